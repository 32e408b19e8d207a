// The heatmap layers x time. Below: the picture. Above it: a transparent canvas for what moves, so that hovering draws nothing anew.
(function (page) {
  "use strict";

  const { numbers, grid, labels, quantities, charts } = page;
  const ROW = 15;
  const TALLEST = 36;
  const FOOT = 24;
  // Room for the strips above and on the right, which say where anything was not finite, and for what points at a layer.
  const HEAD = 6;
  const STRIP = 4;
  const SIDE = 15;
  const FONT = "11px system-ui, sans-serif";
  // Between the end of the axis' name and its first tick, of whose text half is on this side.
  const BESIDE = 24;
  // Beside a name: with a triangle before it, and without one.
  const MARKED = 25;
  const PLAIN = 12;
  const MARKS = { critical: "critical", warning: "warning", info: "info" };

  class Heatmap {
    // `spec`: host elements. `opened(layer)`; `announce(text)` for screen readers.
    constructor(spec, opened, announce) {
      Object.assign(this, spec, { opened, announce });
      this.context = this.canvas.getContext("2d", { alpha: false });
      this.over = this.overlay.getContext("2d");
      this.part = null;
      this.rows = [];
      this.marks = new Map();
      this.selected = null;
      this.at = null;
      this.mode = "fit";
      this.filter = "";
      this.drawn = 0;
      this._listen();
    }

    _listen() {
      const { overlay } = this;
      overlay.addEventListener("pointermove", (event) => this._pointed(event));
      overlay.addEventListener("pointerdown", (event) => this._pointed(event));
      overlay.addEventListener("pointerleave", () => this.point(null));
      overlay.addEventListener("click", (event) => { this._pointed(event); this._open(); });
      overlay.addEventListener("keydown", (event) => this._key(event));
      overlay.addEventListener("blur", () => this.point(null));
      this.scroller.addEventListener("scroll", () => this.draw());
      new ResizeObserver(() => { if (this.scroller.clientWidth !== this.width) this.draw(); }).observe(this.scroller);
      charts.cursor.listeners.push((x, origin) => { if (origin !== this) { this.at = null; this.tip.hidden = true; this._drawOver(x); } });
    }

    // `part`: of History.layers. `run`: of History.run. `range`: of x, in steps or seconds.
    set(quantity, part, run, axis, range) {
      this.quantity = quantity;
      this.part = part;
      this.axis = axis;
      this.range = range;
      this.xs = axis === "time" ? part.times : part.steps;
      // The parts of a rank are not comparable with the norm of all.
      const comparable = quantity === "norm" && run.known && !part.sharded.size;
      const xs = axis === "time" ? run.times : run.steps;
      this.missed = comparable ? grid.missed({ norms: run.norm, xs }, part.columns, this.xs).map((k) => xs[k]) : [];
      this.between.hidden = !this.missed.length;
      this._choose();
      this.draw();
    }

    setFilter(text) {
      this.filter = text.trim().toLowerCase();
      this.at = null;
      if (this.part) { this._choose(); this.draw(); }
    }

    setMode(mode) {
      this.mode = mode;
      this.draw();
    }

    setMarks(marks) {
      const same = marks.size === this.marks.size && [...marks].every(([name, severity]) => this.marks.get(name) === severity);
      this.marks = marks;
      if (!same && this.part) this.draw();
    }

    select(layer) {
      this.selected = layer;
      this.draw();
    }

    names() { return this.rows.map((j) => this.part.layers[j]); }

    _choose() {
      const all = this.part.layers || [];
      this.prefix = labels.commonPrefix(all);
      this.rows = all.map((name, j) => j).filter((j) => !this.filter || all[j].toLowerCase().includes(this.filter));
    }

    // So few layers that the picture is a low one, whatever the filter.
    get low() { return (this.part.layers || []).length * TALLEST < 300; }

    // Whether rows are too narrow to have a name each.
    get crowded() { return this.rows.length * ROW > this.room; }

    _measure() {
      const style = window.getComputedStyle(this.scroller);
      this.room = parseFloat(style.getPropertyValue("--room")) || 520;
      const scrolls = this.mode === "rows" && this.crowded;
      this.rowHeight = scrolls ? ROW : Math.min(TALLEST, this.room / Math.max(1, this.rows.length));
      if (this.rows.length === 1) this.rowHeight = 96;
      this.height = Math.round(scrolls ? this.room : Math.max(48, Math.min(this.room, this.rowHeight * this.rows.length)));
      this.scroller.style.height = `${HEAD + this.height + FOOT}px`;
      this.spacer.style.height = `${scrolls ? this.rows.length * ROW - this.height : 0}px`;
      this.width = Math.max(120, this.scroller.clientWidth);
      this.offset = scrolls ? this.scroller.scrollTop : 0;
      const ratio = window.devicePixelRatio || 1;
      for (const canvas of [this.canvas, this.overlay]) {
        const [wide, high] = [Math.round(this.width * ratio), Math.round((HEAD + this.height + FOOT) * ratio)];
        if (canvas.width !== wide || canvas.height !== high) Object.assign(canvas, { width: wide, height: high });
        canvas.style.width = `${this.width}px`;
        canvas.style.height = `${HEAD + this.height + FOOT}px`;
      }
      this.ratio = ratio;
      this.gutter = this._gutter();
      this.plotWidth = this.width - this.gutter - SIDE;
    }

    _gutter() {
      this.context.font = FONT;
      const most = Math.min(this.width * (this.width < 500 ? 0.37 : 0.3), 230);
      let widest = this.context.measureText(this.axis).width + BESIDE + 2;
      for (const j of this.rows) {
        widest = Math.max(widest, this.context.measureText(this._short(j)).width + (this.marks.has(this.part.layers[j]) ? MARKED : PLAIN + 4));
        if (widest >= most) return Math.round(most);
      }
      return Math.ceil(widest);
    }

    _short(j) { return this.part.layers[j].slice(this.prefix.length); }

    draw() {
      if (!this.part || !this.part.layers) return;
      this._measure();
      this._colours();
      const { context, ratio } = this;
      context.setTransform(1, 0, 0, 1, 0, 0);
      context.fillStyle = page.theme.colour("surface");
      context.fillRect(0, 0, this.canvas.width, this.canvas.height);
      this._image();
      context.setTransform(ratio, 0, 0, ratio, 0, 0);
      this._labels();
      this._xAxis();
      this._drawOver(this.at ? this.xs[this.at.column] : charts.cursor.x);
      if (!this.drawn) performance.mark("heatmap drawn");
      this.drawn += 1;
      document.documentElement.dataset.drawn = String(this.drawn);
    }

    _colours() {
      const { quantity, part } = this;
      const spec = quantities.ALL[quantity];
      const key = `${quantity} ${part.version} ${page.theme.dark}`;
      if (this.colourKey === key && this.coloured === part) return;
      const found = quantities.extent(quantity, part.columns);
      const colour = (name) => page.colours.fromCss(page.theme.colour(name));
      const [table, ground] = [page.colours.table(spec.map()), colour("ground")];
      this.colour = { ...found, table, pale: page.colours.pale(table, ground), nonfinite: colour("nonfinite"), ground, bySize: Boolean(spec.bySize) };
      this.colourKey = key;
      this.coloured = part;
      page.legend.draw(this.legend, quantity, this.colour);
    }

    _image() {
      const { ratio } = this;
      const left = Math.round(this.gutter * ratio);
      const width = Math.max(1, Math.round(this.plotWidth * ratio));
      const height = Math.max(1, Math.round(this.height * ratio));
      const image = this.context.createImageData(width, height);
      const pixels = new Uint32Array(image.data.buffer);
      pixels.fill(this.colour.ground);
      this.bands = grid.bands(this.rows.length, this.offset * ratio, this.rowHeight * ratio, height);
      this.spans = grid.columnsOfPixels(this.xs, this.range, width, this.axis === "time");
      grid.paint(pixels, width, this.part, this.spans, this.rows, this.bands, this.colour, ratio);
      this.context.putImageData(image, left, Math.round(HEAD * ratio));
      this._strips(left, left + width);
    }

    // Above the columns and to the right of the rows in which anything was not finite, which may be too narrow to show it themselves.
    _strips(left, right) {
      const { context, ratio } = this;
      const [least, thick, top] = [Math.ceil(2 * ratio), Math.round(STRIP * ratio), Math.round(HEAD * ratio)];
      const { across, beside } = grid.strips(this.part.flags, this.spans, this.rows, this.bands);
      context.fillStyle = page.theme.colour("warning");
      for (const x of this.missed) {
        const at = Math.round(this._left(x) * ratio);
        if (at >= left && at <= right) context.fillRect(at - (least >> 1), 0, least, top);
      }
      context.fillStyle = page.theme.colour("nonfinite");
      for (const { from, to } of across) context.fillRect(left + from, 0, Math.max(least, to - from), thick);
      for (const { from, to } of beside) context.fillRect(right + Math.round(2 * ratio), top + from, thick, Math.max(least, to - from));
    }

    _labels() {
      const { context, ratio, part } = this;
      const severity = (row) => this.marks.get(part.layers[this.rows[row]]);
      const chosen = (row) => part.layers[this.rows[row]] === this.selected;
      context.font = FONT;
      context.textBaseline = "middle";
      context.textAlign = "right";
      const found = labels.chosen(this.bands, this.height * ratio, (row) => chosen(row) || severity(row) !== undefined, 13 * ratio);
      for (const { y, row } of found) {
        const mark = severity(row);
        const middle = HEAD + y / ratio;
        context.fillStyle = page.theme.colour(mark ? MARKS[mark] || "warning" : chosen(row) ? "text" : "muted");
        const name = labels.shortened(context, this._short(this.rows[row]), this.gutter - (mark ? MARKED : PLAIN));
        context.fillText(name, this.gutter - 8, middle);
        if (mark) this._mark(middle, context.measureText(name).width);
      }
    }

    // A triangle: the colour alone does not say it.
    _mark(y, width) {
      const { context } = this;
      const x = Math.max(1, this.gutter - 8 - width - 13);
      context.beginPath();
      context.moveTo(x + 4.5, y - 5);
      context.lineTo(x + 9, y + 3.5);
      context.lineTo(x, y + 3.5);
      context.fill();
      context.fillRect(this.gutter - 4, y - 2, 3, 4);
    }

    _xAxis() {
      const { context } = this;
      context.font = FONT;
      context.fillStyle = page.theme.colour("muted");
      context.textAlign = "center";
      context.textBaseline = "alphabetic";
      const y = HEAD + this.height + 16;
      let free = -Infinity;
      for (const { x, text } of charts.xTicks(this.axis, this.range[0], this.range[1], Math.max(3, Math.floor(this.plotWidth / 70)))) {
        const half = context.measureText(text).width / 2;
        const at = this._left(x);
        context.fillRect(Math.round(at), HEAD + this.height, 1, 4);
        const middle = Math.min(this.width - half - 1, Math.max(this.gutter, at));
        if (middle - half < free) continue;
        context.fillText(text, middle, y);
        free = middle + half + 8;
      }
      context.textAlign = "right";
      context.fillText(this.axis, this.gutter - BESIDE, y);
    }

    _middle(row) { return HEAD + (row + 0.5) * this.rowHeight - this.offset; }

    _left(x) { return this.gutter + ((x - this.range[0]) / (this.range[1] - this.range[0] || 1)) * this.plotWidth; }

    _drawOver(x) {
      const { over, ratio } = this;
      over.setTransform(1, 0, 0, 1, 0, 0);
      over.clearRect(0, 0, this.overlay.width, this.overlay.height);
      over.setTransform(ratio, 0, 0, ratio, 0, 0);
      const chosen = this.selected === null ? -1 : this.rows.findIndex((j) => this.part.layers[j] === this.selected);
      if (chosen >= 0) this._point(chosen);
      if (x !== null && x >= this.range[0] && x <= this.range[1]) {
        this._line(Math.round(this._left(x)), HEAD, 1, this.height, page.theme.colour("cursor"));
      }
      if (this.at) this._frame(this.at.row);
    }

    // Arrows at both ends of a row, which leave the row itself as it is.
    _point(row) {
      const y = this._middle(row);
      if (y < HEAD || y > HEAD + this.height) return;
      const right = this.gutter + this.plotWidth + SIDE - 8;
      this.over.fillStyle = page.theme.colour("accent");
      for (const [tip, back] of [[this.gutter, this.gutter - 7], [right, right + 7]]) {
        this.over.beginPath();
        this.over.moveTo(tip, y);
        this.over.lineTo(back, y - 5);
        this.over.lineTo(back, y + 5);
        this.over.fill();
      }
    }

    // Lines above and below a row; at some distance from a thin one.
    _frame(row) {
      const colour = page.theme.colour("cursor");
      const apart = this.rowHeight < 6 ? 2 : 0;
      const top = HEAD + row * this.rowHeight - this.offset - apart;
      const bottom = top + this.rowHeight + 2 * apart;
      if (bottom < HEAD || top > HEAD + this.height) return;
      this._line(this.gutter, Math.round(top) - 1, this.plotWidth, 1, colour);
      this._line(this.gutter, Math.min(HEAD + this.height, Math.round(bottom)), this.plotWidth, 1, colour);
    }

    // With a dark rim, to be seen on any colour.
    _line(x, y, width, height, colour) {
      this.over.fillStyle = "rgb(0 0 0 / 45%)";
      this.over.fillRect(x - 1, y - 1, width + 2, height + 2);
      this.over.fillStyle = colour;
      this.over.fillRect(x, y, width, height);
    }

    _pointed(event) {
      const box = this.overlay.getBoundingClientRect();
      const x = event.clientX - box.left;
      const y = event.clientY - box.top - HEAD;
      if (!this.bands || y < -HEAD || y >= this.height || !this.rows.length || !this.xs.length) return this.point(null);
      const band = this.bands.find((one) => y * this.ratio < one.to + 1) || this.bands[this.bands.length - 1];
      const pixel = Math.floor((x - this.gutter) * this.ratio);
      const within = pixel >= 0 && pixel < this.spans.first.length;
      const first = within ? this.spans.first[pixel] : grid.NONE;
      if (!within && y >= 0) return this.point({ row: band.first, column: null, layers: 1, samples: 0 }, event);
      if (first === grid.NONE) return this.point(null);
      return this.point(y < 0 ? this._above(first, this.spans.last[pixel]) : this._under(first, this.spans.last[pixel], band), event);
    }

    // What is under a point of the picture: the largest of it.
    _under(first, last, band) {
      const { part, rows } = this;
      const found = grid.largest(part.columns, first, last, rows, band.first, band.last, this.colour.bySize);
      const place = { row: found.row < 0 ? band.first : found.row, column: found.column < 0 ? last : found.column };
      const bad = grid.flagged(part.flags, first, last, rows, band.first, band.last) !== null;
      return { ...place, bad, layers: band.last - band.first + 1, samples: last - first + 1 };
    }

    // What the strip above the picture marks: the first layer that was not finite.
    _above(first, last) {
      const found = grid.flagged(this.part.flags, first, last, this.rows, 0, this.rows.length - 1);
      return found && { ...found, layers: 1, samples: 1 };
    }

    // Shows the cell `at`, next to the pointer or else next to the cell.
    point(at, event = null) {
      this.at = at;
      const x = at && at.column !== null ? this.xs[at.column] : null;
      charts.cursor.move(x, this);
      this.tip.hidden = !at;
      if (this.part) this._drawOver(x);
      if (!at) return;
      page.tooltip.fill(this.tip, this.describe(at));
      const box = this.frame.getBoundingClientRect();
      const canvas = this.overlay.getBoundingClientRect();
      const left = event ? event.clientX - box.left : canvas.left - box.left + this._left(x);
      const top = event ? event.clientY - box.top : canvas.top - box.top + this._middle(at.row);
      page.tooltip.place(this.tip, this.frame, left, top);
    }

    describe(at) {
      const layer = this.part.layers[this.rows[at.row]];
      if (at.column === null) return { layer };
      const spec = quantities.ALL[this.quantity];
      const last = grid.lastKnown(this.part.columns, at.column, this.rows[at.row]);
      const value = last === grid.NONE ? NaN : this.part.columns[last][this.rows[at.row]];
      const earlier = last !== at.column;
      const read = spec.format(spec.log ? 10 ** value : value);
      let text = earlier ? `${read} at step ${numbers.count(this.part.steps[last])}` : read;
      if (value === Infinity || Number.isNaN(value)) text = value === Infinity && !earlier ? "not finite (NaN or Inf)" : "no value";
      const flagged = at.bad || Boolean((this.part.flags[at.column] || [])[this.rows[at.row]]);
      const of = [];
      if (at.layers > 1) of.push(`${at.layers} layers`);
      if (at.samples > 1) of.push(`${at.samples} samples`);
      return {
        layer, step: this.part.steps[at.column], time: this.part.times[at.column], text, problem: this.marks.get(layer),
        word: quantities.word(this.quantity, this.part.sharded.has(layer)),
        bad: value === Infinity && !earlier, also: flagged && (earlier || value !== Infinity) ? "also not finite" : "", of: of.length ? `largest of ${of.join(" × ")} under this point` : "",
      };
    }

    _open() {
      if (this.at) this.opened(this.part.layers[this.rows[this.at.row]]);
    }

    _key(event) {
      if (!this.part || !this.rows.length || !this.xs.length || event.ctrlKey || event.metaKey || event.altKey) return;
      const far = event.shiftKey ? 10 : 1;
      const moves = { ArrowUp: [-far, 0], ArrowDown: [far, 0], ArrowLeft: [0, -far], ArrowRight: [0, far], PageUp: [-20, 0], PageDown: [20, 0], Home: [0, -1e9], End: [0, 1e9] };
      if (event.key === "Enter" || event.key === " ") this._open();
      else if (event.key === "Escape" && this.at) { this.point(null); event.stopPropagation(); }
      else if (moves[event.key]) this._step(...moves[event.key]);
      else return;
      event.preventDefault();
    }

    _step(down, right) {
      const begin = this.at && this.at.column !== null ? this.at : { row: 0, column: this.xs.length - 1 };
      const moved = this.at ? [begin.row + down, begin.column + right] : [begin.row, begin.column];
      const [low, high] = [charts.nearest(this.xs, this.range[0]), charts.nearest(this.xs, this.range[1])];
      const row = Math.max(0, Math.min(this.rows.length - 1, moved[0]));
      const column = Math.max(low, Math.min(high, moved[1]));
      this._reveal(row);
      this.point({ row, column, layers: 1, samples: 1 });
      const { layer, step, word, text, also } = this.describe(this.at);
      this.announce([layer, `step ${numbers.count(step)}`, `${word} ${text}`, also].filter(Boolean).join(", "));
    }

    _reveal(row) {
      const top = row * this.rowHeight;
      if (top < this.offset) this.scroller.scrollTop = top;
      else if (top + this.rowHeight > this.offset + this.height) this.scroller.scrollTop = top + this.rowHeight - this.height;
      else return;
      this.draw();
    }
  }

  page.heatmap = { Heatmap };
})(window.TorchGrad = window.TorchGrad || {});

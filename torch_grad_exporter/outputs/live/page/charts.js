// Lines over steps or time, drawn by uPlot, with one cursor for all of them and the heatmap.
(function (page) {
  "use strict";

  const { numbers } = page;
  const FONT = "11px system-ui, sans-serif";

  // Where the cursor is, in steps or Unix time; null: nowhere. The chart that moves it notifies all the others.
  const cursor = {
    x: null,
    listeners: [],
    move(x, origin) {
      if (x === cursor.x) return;
      cursor.x = x;
      for (const listener of cursor.listeners) listener(x, origin);
    },
  };

  function known(value) { return value !== null && value !== undefined; }

  function bad(value) { return known(value) && !Number.isFinite(value); }

  // The place in an ascending list that is nearest to x.
  function nearest(list, x) {
    let low = 0;
    let high = list.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (list[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low > 0 && x - list[low - 1] < list[low] - x ? low - 1 : low;
  }

  function xTicks(axis, low, high, most) {
    if (axis !== "time") return ticksOfSteps(low, high, most);
    const at = numbers.timeTicks(low, high, most);
    const gap = at.length > 1 ? at[1] - at[0] : 60;
    return at.map((x) => ({ x, text: numbers.timeTick(x, gap) }));
  }

  function ticksOfSteps(low, high, most) {
    return numbers.ticks(low, high, most).filter(Number.isInteger).map((x) => ({ x, text: numbers.compact(x) }));
  }

  function xText(axis, x) {
    return axis === "time" ? numbers.moment(x) : `step ${numbers.count(x)}`;
  }

  function wide(lists) {
    const shown = lists.flat().filter((value) => known(value) && Number.isFinite(value));
    const low = shown.reduce((least, value) => Math.min(least, value), Infinity);
    return low > 0 && shown.some((value) => value >= 1000 * low);
  }

  class Chart {
    // `spec`: id, title, log (true; "wide": from three decades on, of values above 0), format, series [{label, colour}], of which a later one lies over those before. `zoomed([low, high] or null)`.
    constructor(host, spec, zoomed) {
      this.spec = spec;
      this.log = spec.log === true;
      this.zoomed = zoomed;
      this.range = [0, 1];
      this.axis = "step";
      this._build(host);
      this._draw();
      new ResizeObserver(() => this._fit()).observe(this.plot);
      this.listener = (x, origin) => this._follow(x, origin);
      cursor.listeners.push(this.listener);
    }

    close() {
      cursor.listeners.splice(cursor.listeners.indexOf(this.listener), 1);
      this.uplot.destroy();
      this.figure.remove();
    }

    _build(host) {
      const { element } = page.dom;
      this.values = this.spec.series.map(() => element("span", { class: "value" }));
      this.of = element("span", { class: "of" });
      const legend = element("span", { class: "legend" }, this.of);
      this.spec.series.forEach((one, k) => {
        const key = element("span", { class: "key" });
        if (this.spec.series.length > 1) {
          const swatch = element("span", { class: "swatch" });
          swatch.style.borderTopColor = `var(--${one.colour})`;
          key.append(swatch, one.label, " ");
        }
        key.append(this.values[k]);
        legend.append(key);
      });
      this.title = element("h3", {}, this.spec.title);
      this.nothing = element("p", { class: "nothing", hidden: "" }, this.spec.nothing || "No value yet");
      this.also = element("p", { class: "also" });
      this.acted = element("p", { class: "acted" });
      this.plot = element("div", { class: "plot empty", role: "img" }, this.also, this.acted);
      const caption = element("figcaption", {}, this.title, legend);
      this.figure = element("figure", { class: "chart", id: this.spec.id, "data-testid": this.spec.id }, caption, this.plot, this.nothing);
      host.append(this.figure);
    }

    _draw() {
      const { theme } = page;
      const muted = () => theme.colour("muted");
      const axis = { stroke: muted, font: FONT, grid: { stroke: () => theme.colour("grid"), width: 1 }, ticks: { show: false } };
      const line = window.uPlot.paths.linear();
      const series = this.spec.series.map((one) => ({
        stroke: () => theme.colour(one.colour), width: 1.25, scale: "y",
        paths: (u, s, first, last) => (this._sparse(s - 1) ? null : line(u, s, first, last)),
        points: { show: (u, s) => u.data[0].length < 12 || this._sparse(s - 1), size: 4, fill: () => theme.colour(one.colour) },
      }));
      const options = {
        ...this._size(), legend: { show: false }, padding: [8, 22, 0, 0],
        cursor: { y: false, points: { size: 6 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => this.zoomed(null) } },
        scales: { x: { time: false, range: () => this.range }, y: { range: (u, low, high) => this._yRange(low, high) } },
        axes: [
          { ...axis, size: 24, gap: 4, splits: (u, k, low, high) => this._ticks(u.bbox.width, low, high).map((tick) => tick.x), values: (u, at) => this._texts(u, at) },
          { ...axis, size: 54, gap: 6, splits: (u, k, low, high) => this._yTicks(low, high), values: (u, at) => at.map((y) => this._yText(y)) },
        ],
        series: [{}, ...series],
        hooks: { setCursor: [(u) => this._moved(u)], setSelect: [(u) => this._selected(u)], draw: [(u) => this._marks(u), (u) => page.marks.draw(u, this.axis)] },
      };
      this.lists = this.spec.series.map(() => []);
      this.uplot = new window.uPlot(options, [[], ...this.lists], this.plot);
    }

    _fit() {
      const { width, height } = this._size();
      if (width !== this.uplot.width || height !== this.uplot.height) this.uplot.setSize({ width, height });
    }

    _size() { return { width: Math.max(80, this.plot.clientWidth), height: Math.max(80, this.plot.clientHeight) }; }

    // `xs` and a list of values for each series: null where there is none, NaN and Infinity as they are. `flags`: for each series at which
    // places something was not finite, whatever the value is. `of`: in words, what a value is of.
    set(axis, range, xs, lists, flags, of = "") {
      page.dom.text(this.of, of);
      this.axis = axis;
      this.range = range;
      this.xs = xs;
      this.raw = lists;
      this.flags = flags.map((marks, s) => marks.map((mark, k) => mark || bad(lists[s][k])));
      if (this.spec.log === "wide") this.log = wide(lists);
      this.lists = lists.map((list) => list.map((value) => this._y(value)));
      const any = lists.some((list) => list.some(known));
      this.nothing.hidden = any;
      this.plot.classList.toggle("empty", !any);
      this.uplot.setData([xs, ...this.lists]);
      this._show(cursor.x);
    }

    redraw() { this.uplot.redraw(false, true); }

    // uPlot ends a line at null and goes on across undefined: a record without a new sample is no gap, what is not finite is one.
    _y(value) {
      if (value === null || value === undefined) return undefined;
      if (!Number.isFinite(value)) return null;
      if (!this.log) return value;
      return value > 0 ? Math.log10(value) : null;
    }

    _yRange(low, high) {
      if (low === null || high === null) return this.log ? [-1, 1] : [0, 1];
      if (this.spec.fixed && high <= this.spec.fixed[1] && low >= this.spec.fixed[0]) return this.spec.fixed;
      const least = this.log ? 0.4 : Math.max(Math.abs(high), 1e-12) * 0.02;
      const pad = Math.max((high - low) * 0.06, (least - (high - low)) / 2);
      return [!this.log && low >= 0 && low - pad < 0 ? 0 : low - pad, high + pad];
    }

    _yTicks(low, high) {
      const most = Math.max(2, Math.floor(this.uplot.height / 28));
      return this.log ? numbers.logTicks(low, high, most) : numbers.ticks(low, high, most);
    }

    _yText(y) {
      const value = this.log ? 10 ** y : y;
      return this.spec.tick ? this.spec.tick(value) : this.log ? numbers.logTick(y) : numbers.number(Number(value.toPrecision(6)), 4, true);
    }

    _ticks(width, low, high) {
      return xTicks(this.axis, low, high, Math.max(2, Math.floor(width / window.devicePixelRatio / 52)));
    }

    _texts(u, at) {
      const texts = new Map(this._ticks(u.bbox.width, u.scales.x.min, u.scales.x.max).map((tick) => [tick.x, tick.text]));
      return at.map((x) => texts.get(x) || "");
    }

    setTitle(title) {
      this.spec = { ...this.spec, title };
      page.dom.text(this.title, title);
    }

    // What was not finite has a mark of its own at the upper edge: a gap alone would be overlooked.
    _marks(u) {
      if (!this.raw) return;
      const ratio = window.devicePixelRatio;
      u.ctx.save();
      u.ctx.fillStyle = page.theme.colour("nonfinite");
      for (const marks of this.flags) {
        marks.forEach((mark, k) => {
          if (!mark) return;
          const x = u.valToPos(this.xs[k], "x", true);
          if (x < u.bbox.left || x > u.bbox.left + u.bbox.width) return;
          u.ctx.fillRect(Math.round(x - ratio), u.bbox.top - 6 * ratio, 2 * ratio, 6 * ratio);
        });
      }
      u.ctx.restore();
    }

    _moved(u) {
      const { left, idx } = u.cursor;
      cursor.move(left >= 0 && idx !== null && idx !== undefined ? this.xs[idx] : null, this);
    }

    _selected(u) {
      const { left, width } = u.select;
      if (width < 5) return;
      const chosen = [u.posToVal(left, "x"), u.posToVal(left + width, "x")];
      u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
      this.zoomed(chosen);
    }

    _follow(x, origin) {
      if (origin !== this) {
        const left = x === null ? -10 : this.uplot.valToPos(x, "x");
        this.uplot.setCursor({ left, top: x === null ? -10 : 5 }, false);
      }
      this._show(x);
    }

    // Whether a series has few of the values that the first one has, as of samples among steps: a line would join what is far apart.
    _sparse(s) {
      const [first, own] = [0, s].map((k) => this.raw[k].filter(known).length);
      return 2 * own < first;
    }

    // The last place up to k at which there is a value.
    _last(s, k) {
      let at = k;
      while (at > 0 && !known(this.raw[s][at])) at -= 1;
      return at;
    }

    // Which of the numbers that are not finite it was is not kept.
    _said(s, k) {
      const value = this.raw[s][this._last(s, k)];
      return bad(value) ? "not finite" : this.spec.format(value);
    }

    // The values at the cursor, else the last ones.
    _show(x) {
      if (!this.xs || !this.xs.length) return;
      const k = x === null ? this.xs.length - 1 : nearest(this.xs, x);
      // Values of different steps are no pair: each then has its own, and beside it the first series' value there.
      const places = this.raw.map((list, s) => this._last(s, k));
      const apart = new Set(places).size > 1;
      this.values.forEach((value, s) => {
        const at = places[s];
        const of = at !== places[0] && known(this.raw[0][at]) ? ` of ${this._said(0, at)}` : "";
        value.textContent = this._said(s, k) + of + (apart && known(this.raw[s][at]) ? ` (${xText(this.axis, this.xs[at])})` : "");
      });
      this.also.textContent = this.flags.some((marks, s) => marks[k] && !bad(this.raw[s][k])) ? "also not finite" : "";
      page.dom.text(this.acted, page.marks.at(this.uplot, this.axis, x));
      const texts = this.spec.series.map((one, s) => `${one.label} ${this._said(s, this.xs.length - 1)}`);
      this.plot.setAttribute("aria-label", `${this.spec.title}, last: ${texts.join(", ")}`);
    }
  }

  page.charts = { Chart, cursor, nearest, xTicks, xText };
})(window.TorchGrad = window.TorchGrad || {});

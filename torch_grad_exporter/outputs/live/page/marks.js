// What actions did to the run: marks on the charts, and a list of them in words.
(function (page) {
  "use strict";

  const { numbers } = page;
  const { element, icon, byId, text } = page.dom;
  const SHOWN = 4;
  const RESULTS = { done: ["Done", "check", "good"], failed: ["Failed", "cross", "critical"], refused: ["Refused", "warning", "warning"] };
  const FONT = "10px system-ui, sans-serif";
  const NEAR = 5;

  function resultOf(mark) { return RESULTS[mark.result] || [String(mark.result), "info", "info"]; }

  function said(mark) { return `${mark.name}: ${mark.action} ${resultOf(mark)[0].toLowerCase()}`; }

  // The end of a name in parentheses is for the list.
  function short(mark) { return String(mark.action).split("(")[0].slice(0, 24); }

  function place(mark, axis) { return numbers.parse(axis === "time" ? mark.time : mark.step); }

  class Marks {
    constructor() {
      this.list = [];
      this.axis = "step";
      this.all = false;
    }

    // Whether anything is new. `seek(x)`: moves the cursor of all charts.
    show(list, axis, seek) {
      const key = JSON.stringify([list.length, list[list.length - 1], axis, this.all]);
      if (key === this.key) return false;
      [this.key, this.list, this.axis, this.seek] = [key, list, axis, seek];
      this._rows();
      return true;
    }

    _rows() {
      byId("actions").hidden = !this.list.length;
      text(byId("action-count"), this.list.length ? numbers.count(this.list.length) : "");
      const newest = [...this.list].reverse();
      const rows = (this.all ? newest : newest.slice(0, SHOWN)).map((mark) => this._row(mark));
      if (newest.length > SHOWN) rows.push(this._more(newest.length - SHOWN));
      byId("action-list").replaceChildren(...rows);
    }

    _row(mark) {
      const [word, picture, level] = resultOf(mark);
      const when = `step ${numbers.count(numbers.parse(mark.step))}, ${numbers.clock(numbers.parse(mark.time))}`;
      const body = element("button", { type: "button", class: "body", "data-step": String(mark.step) },
        element("span", { class: "severity" }, icon(picture), word),
        element("span", { class: "alert" }, mark.name),
        element("span", { class: "text" }, `${mark.action} at ${when}`),
        element("span", { class: "go" }, "Show in charts"));
      body.addEventListener("click", () => this.seek(place(mark, this.axis)));
      return element("li", { "data-severity": level, "data-result": mark.result }, body);
    }

    _more(count) {
      const button = element("button", { type: "button", class: "plain", "aria-expanded": String(this.all) }, this.all ? "Show fewer" : `Show ${count} more`);
      button.addEventListener("click", () => {
        this.all = !this.all;
        this._rows();
        byId("action-list").querySelector(".more button").focus();
      });
      return element("li", { class: "more" }, button);
    }

    // On a chart of uPlot: a dashed line at each, and what it was where there is room.
    draw(u, axis) {
      if (!this.list.length) return;
      const { ctx, bbox } = u;
      const ratio = window.devicePixelRatio;
      let free = -Infinity;
      ctx.save();
      ctx.font = FONT.replace("10px", `${10 * ratio}px`);
      [ctx.textAlign, ctx.textBaseline] = ["left", "top"];
      ctx.lineWidth = ratio;
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      for (const mark of this.list) {
        const x = Math.round(u.valToPos(place(mark, axis), "x", true));
        if (!(x >= bbox.left && x <= bbox.left + bbox.width)) continue;
        ctx.strokeStyle = ctx.fillStyle = page.theme.colour(mark.result === "done" ? "text" : resultOf(mark)[2]);
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
        const width = ctx.measureText(short(mark)).width;
        const left = x + width + 3 * ratio > bbox.left + bbox.width ? x - width - 3 * ratio : x + 3 * ratio;
        if (left < free) continue;
        ctx.fillText(short(mark), left, bbox.top + 2 * ratio);
        free = left + width + 4 * ratio;
      }
      ctx.restore();
    }

    // In words, those that are near a place, in pixels, of a chart.
    at(u, axis, x) {
      if (x === null || !this.list.length) return "";
      const here = u.valToPos(x, "x");
      return this.list.filter((mark) => Math.abs(u.valToPos(place(mark, axis), "x") - here) <= NEAR).map(said).join("; ");
    }
  }

  page.marks = new Marks();
})(window.TorchGrad = window.TorchGrad || {});

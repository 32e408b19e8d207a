// One layer: its numbers, its history and its distribution.
(function (page) {
  "use strict";

  const { numbers, quantities, charts } = page;
  const { element, byId, text } = page.dom;

  const SPECS = [
    { quantity: "norm", log: true },
    { quantity: "zscore" },
    { quantity: "zero_ratio", fixed: [0, 0.01] },
    { quantity: "dead_ratio", fixed: [0, 1] },
    { quantity: "mean", nothing: "Needs start_exporter(moments=True)" },
    { quantity: "stddev", log: true, nothing: "Needs start_exporter(moments=True)" },
  ];
  // Those that are of this rank's part where the layer is sharded.
  const OF_PART = ["norm", "mean", "stddev"];
  const specOf = (quantity) => quantities.ALL[quantity] || quantities.MOMENTS[quantity];

  const FACTS = [
    ["norm", "Norm", (value) => numbers.number(value, 3)],
    ["max_magnitude", "Largest element", (value) => numbers.number(value, 3)],
    ["zero_ratio", "Zeros", numbers.percent],
    ["dead_ratio", "Dead units", numbers.percent],
    ["units", "Output units", numbers.count],
    ["spikes", "Spikes", numbers.count],
    ["nonfinite_elements", "Non-finite elements", numbers.count],
    ["captures", "Samples", numbers.count],
  ];

  const SHARD = ["shard_norm", `Norm, ${quantities.PART}`, FACTS[0][2]];

  class Layer {
    // `closed()`: the visitor has closed it.
    constructor(closed, zoomed) {
      this.section = byId("layer");
      this.name = null;
      this.charts = null;
      this.zoomed = zoomed;
      byId("layer-close").addEventListener("click", closed);
    }

    open(name, opener) {
      this.name = name;
      this.opener = opener;
      text(byId("layer-name"), name);
      text(byId("layer-note"), "Loading");
      this.section.hidden = false;
      this.section.dataset.layer = name;
      if (!this.charts) this._build();
      this.section.classList.add("waiting");
    }

    reveal() {
      const still = window.matchMedia("(prefers-reduced-motion: reduce)").matches;
      byId("layer-close").focus({ preventScroll: true });
      this.section.scrollIntoView({ block: "nearest", behavior: still ? "auto" : "smooth" });
    }

    close() {
      this.name = null;
      this.section.hidden = true;
      if (this.opener && this.opener.isConnected) this.opener.focus({ preventScroll: true });
    }

    fail(said) { text(byId("layer-note"), said); }

    _build() {
      const tick = (value) => numbers.percent(value);
      this.charts = SPECS.map(({ quantity, log, fixed, nothing }) => {
        const spec = specOf(quantity);
        const ratio = quantity.endsWith("ratio");
        const series = [{ label: spec.word, colour: "line-1" }];
        return new charts.Chart(byId("layer-charts"), {
          id: `layer-${quantity}`, title: spec.title, log, fixed, series, format: spec.format, tick: ratio ? tick : null, nothing: nothing || "No value yet",
        }, this.zoomed);
      });
    }

    redraw() {
      if (this.charts) for (const chart of this.charts) chart.redraw();
    }

    // `answer`: of /api/v1/layer. `range`: of x.
    show(answer, view, axis, range) {
      this.section.classList.remove("waiting");
      const { sharded } = answer;
      text(byId("layer-note"), sharded ? `Sharded over ranks: the norm and its distribution are of ${quantities.PART}.` : "");
      text(byId("distribution-title"), `Distribution of the norm${sharded ? ` of ${quantities.PART}` : ""}`);
      SPECS.forEach(({ quantity }, k) => {
        const { title } = specOf(quantity);
        if (OF_PART.includes(quantity)) this.charts[k].setTitle(!sharded ? title : quantity === "norm" ? `Norm of ${quantities.PART}` : `${title}, ${quantities.PART}`);
      });
      const part = answer[view] || {};
      const of = part.stride > 1 ? `largest of ${numbers.count(part.stride)} records` : "";
      const xs = (axis === "time" ? part.times : part.steps) || [];
      SPECS.forEach(({ quantity }, k) => {
        const list = part[quantity] ? part[quantity].map(numbers.parse) : xs.map(() => null);
        this.charts[k].set(axis, range, xs, [list], [page.history.flagsOf((part.nonfinite || {})[quantity], xs.length)], of);
      });
      this._facts(answer);
      this._distribution(answer.distribution);
    }

    _facts(answer) {
      const facts = answer.sharded ? [SHARD, ...FACTS.slice(1)] : FACTS;
      const rows = facts.map(([key, label, format]) => {
        const value = numbers.parse(answer[key]);
        const level = key === "nonfinite_elements" && value > 0 ? "critical" : key === "spikes" && value > 0 ? "warning" : null;
        return element("div", { "data-level": level }, element("dt", {}, label), element("dd", { "data-testid": `layer-${key}`, "data-value": value === null ? "" : String(value) }, format(value)));
      });
      byId("layer-facts").replaceChildren(...rows);
    }

    _distribution(distribution) {
      const box = byId("layer-distribution");
      const total = distribution ? distribution.counts.reduce((sum, count) => sum + count, 0) : 0;
      text(byId("distribution-note"), total ? numbers.counted(total, "sample") : "");
      if (!total) {
        box.replaceChildren(element("p", { class: "nothing" }, "No sample yet"));
        return;
      }
      const most = Math.max(...distribution.counts);
      const { bounds, counts } = distribution;
      const every = Math.ceil(bounds.length / 7);
      const said = (k) => (k === 0 ? `up to ${bound(bounds[0])}` : k === bounds.length ? `above ${bound(bounds[k - 1])}` : `${bound(bounds[k - 1])} to ${bound(bounds[k])}`);
      box.replaceChildren(...counts.map((count, k) => {
        const fill = element("span", { class: "fill" });
        fill.style.height = count ? `max(2px, ${(count / most) * 100}%)` : "0";
        const share = element("span", { class: "share" }, count ? percentOf(count, total) : "");
        const edge = element("span", { class: "edge", "aria-hidden": "true" }, k < bounds.length && k % every === 0 ? bound(bounds[k]) : "");
        const label = `${said(k)}: ${numbers.count(count)}`;
        return element("li", { title: label }, element("span", { class: "unseen" }, label), element("span", { class: "column", "aria-hidden": "true" }, share, fill), edge);
      }));
    }
  }

  function percentOf(count, total) {
    const share = (count / total) * 100;
    return share < 1 ? "<1" : String(Math.round(share));
  }

  function bound(value) { return numbers.logTick(Math.log10(value)); }

  page.layer = { Layer };
})(window.TorchGrad = window.TorchGrad || {});

// A chart for each number that the script logs, grouped by the part of its name before the first slash.
(function (page) {
  "use strict";

  const { numbers } = page;
  const { element, byId } = page.dom;

  function groupOf(name) {
    const at = name.indexOf("/");
    return at > 0 ? name.slice(0, at) : "";
  }

  class Values {
    // `zoomed([low, high] or null)`: see Chart.
    constructor(zoomed) {
      this.zoomed = zoomed;
      this.charts = new Map();
      this.groups = new Map();
    }

    // `kept`: what History knows of one view.
    show(kept, axis, range) {
      const names = kept.names || [];
      byId("values").hidden = !names.length;
      for (const [name, chart] of this.charts) {
        if (names.includes(name)) continue;
        chart.close();
        this.charts.delete(name);
      }
      const xs = axis === "time" ? kept.times : kept.steps;
      for (const name of names) {
        // Only records that have a value: names are logged at steps of their own.
        const at = xs.map((x, i) => i).filter((i) => (kept.rows[i].get(name) ?? null) !== null || kept.marks[i].has(name));
        const values = at.map((i) => kept.rows[i].get(name) ?? null);
        this._chart(name).set(axis, range, at.map((i) => xs[i]), [values], [at.map((i) => kept.marks[i].has(name))]);
      }
      for (const [group, host] of this.groups) host.hidden = !names.some((name) => groupOf(name) === group);
    }

    redraw() {
      for (const chart of this.charts.values()) chart.redraw();
    }

    _chart(name) {
      if (!this.charts.has(name)) {
        const group = groupOf(name);
        const spec = { id: `value-${name}`, title: group ? name.slice(group.length + 1) : name, format: (v) => numbers.number(v, 4), series: [{ label: name, colour: "line-1" }] };
        this.charts.set(name, new page.charts.Chart(this._group(group).lastElementChild, spec, this.zoomed));
      }
      return this.charts.get(name);
    }

    _group(name) {
      if (!this.groups.has(name)) {
        const host = element("section", { class: "group" }, element("h3", {}, name), element("div", { class: "grid" }));
        host.firstElementChild.hidden = !name;
        this.groups.set(name, host);
        byId("values-groups").append(host);
      }
      return this.groups.get(name);
    }
  }

  page.values = { Values };
})(window.TorchGrad = window.TorchGrad || {});

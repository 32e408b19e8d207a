// Puts the parts together: what is shown is one small state, which the address keeps.
(function (page) {
  "use strict";

  const { numbers, quantities } = page;
  const { byId, text } = page.dom;

  const CHOICES = { view: ["whole", "recent"], axis: ["step", "time"], quantity: page.history.QUANTITIES };
  const seconds = (value) => numbers.duration(value);

  class App {
    constructor(saved) {
      this.saved = saved;
      this.history = new page.history.History();
      this.state = { view: "whole", axis: "step", quantity: "norm", layer: null, zoom: null, ...fromAddress() };
      this.layerAnswer = null;
      this.round = 0;
      this.quiet = 0;
      // The first request is under way while the rest is built.
      if (!saved) this._live();
      this.overview = new page.overview.Overview((layer, opener) => this.open(layer, opener));
      const zoomed = (range) => this.change({ zoom: range });
      this._charts(zoomed);
      this.values = new page.values.Values(zoomed);
      this.layer = new page.layer.Layer(() => this.change({ layer: null }), zoomed);
      const parts = { frame: "heatmap-frame", scroller: "heatmap-scroller", spacer: "heatmap-spacer", canvas: "heatmap", overlay: "heatmap-overlay", tip: "tooltip", legend: "legend", between: "heatmap-between" };
      const elements = Object.fromEntries(Object.entries(parts).map(([key, id]) => [key, byId(id)]));
      this.heatmap = new page.heatmap.Heatmap(elements, (layer) => this.open(layer, elements.overlay), (said) => this._tell(said));
      this._controls();
      this._buttons();
      if (this.state.layer !== null) {
        this.layer.open(this.state.layer, null);
        this.heatmap.selected = this.state.layer;
      }
      if (saved) this._showSaved();
    }

    _charts(zoomed) {
      const host = byId("charts");
      const make = (spec) => new page.charts.Chart(host, spec, zoomed);
      const value = (digits) => (shown) => numbers.number(shown, digits);
      this.charts = {
        norm: make({ id: "chart-norm", title: "Global norm", log: true, format: value(3), nothing: "No gradient was sampled yet",
          series: [{ label: "before", colour: "line-2" }, { label: "after clipping", colour: "line-1" }] }),
        loss: make({ id: "chart-loss", title: "Loss", log: "wide", format: value(4), nothing: "No loss: give it with exporter.observe(loss=...)", series: [{ label: "loss", colour: "line-1" }] }),
        time: make({ id: "chart-step-time", title: "Step time", log: true, format: seconds, tick: seconds, nothing: "Fewer than two steps so far", series: [{ label: "step time", colour: "line-1" }] }),
      };
    }

    _controls() {
      for (const button of document.querySelectorAll("button[data-choice]")) {
        button.addEventListener("click", () => {
          const { choice, value } = button.dataset;
          this.change(choice === "quantity" ? { quantity: value } : { [choice]: value, zoom: null });
        });
      }
      byId("zoom-reset").addEventListener("click", () => this.change({ zoom: null }));
      const filter = byId("filter");
      filter.addEventListener("input", () => { this.heatmap.setFilter(filter.value); this._rows(); });
      filter.addEventListener("keydown", (event) => {
        if (event.key === "Escape" && filter.value) { filter.value = ""; this.heatmap.setFilter(""); this._rows(); event.stopPropagation(); }
        // Else the same key would press the button to which the focus goes.
        if (event.key === "Enter") event.preventDefault();
        if (event.key === "Enter" && this.heatmap.rows.length === 1) this.open(this.heatmap.names()[0], filter);
        else if (event.key === "Enter") byId("heatmap-overlay").focus();
      });
      byId("rows-mode").addEventListener("click", () => {
        this.heatmap.setMode(this.heatmap.mode === "fit" ? "rows" : "fit");
        this._rows();
      });
      document.addEventListener("keydown", (event) => { if (event.key === "Escape" && this.state.layer !== null) this.change({ layer: null }); });
      window.addEventListener("hashchange", () => this.change({ layer: null, ...fromAddress() }));
      const hint = byId("hint").textContent;
      page.charts.cursor.listeners.push((x) => text(byId("hint"), x === null ? hint : page.charts.xText(this.state.axis, x)));
      byId("theme").addEventListener("click", () => page.theme.next());
      page.theme.onChange(() => this._themed());
      this._themed(true);
    }

    _themed(first = false) {
      const { choice } = page.theme;
      text(byId("theme-choice"), { auto: "Auto", light: "Light", dark: "Dark" }[choice]);
      byId("theme").setAttribute("aria-label", `Colours: ${choice}`);
      if (first) return;
      this._redraw();
      this.heatmap.draw();
    }

    _redraw() {
      for (const chart of Object.values(this.charts)) chart.redraw();
      this.values.redraw();
      this.layer.redraw();
    }

    open(layer, opener) {
      this.change({ layer }, opener);
    }

    change(part, opener = null) {
      const before = this.state;
      this.state = { ...before, ...part };
      toAddress(this.state);
      this._buttons();
      if (this.state.layer !== before.layer) {
        this.layerAnswer = null;
        if (this.state.layer === null) this.layer.close();
        else this.layer.open(this.state.layer, opener);
        this.heatmap.select(this.state.layer);
      }
      if (part.layer !== undefined && part.layer !== null) this.layer.reveal();
      this.quiet = 0;
      this.draw();
      if (this.saved) this._savedLayer();
      else this.live.now();
    }

    _buttons() {
      for (const button of document.querySelectorAll("button[data-choice]")) {
        button.setAttribute("aria-pressed", String(this.state[button.dataset.choice] === button.dataset.value));
      }
      byId("zoom-reset").hidden = !this.state.zoom;
      text(byId("heatmap-about"), quantities.ALL[this.state.quantity].about);
      this._title();
    }

    _title() {
      const { view, quantity } = this.state;
      const { sharded, layers } = this.history.layers[quantity][view];
      text(byId("heatmap-title"), quantities.title(quantity, sharded ? sharded.size : 0, (layers || []).length));
    }

    // Requests of one round, one after the other; an answer is drawn while the next is awaited.
    async _ask(get) {
      const status = await get("status");
      this.live.answered();
      this._renew(status);
      const { view, quantity, layer } = this.state;
      // After the last step or sample there is one more round, for what the worker of the exporter had not yet entered.
      const key = `${status.step} ${status.samples} ${status.values} ${view} ${quantity}`;
      const known = status.step !== null || typeof status.samples === "number";
      this.quiet = known && key === this.asked ? this.quiet + 1 : 0;
      this.asked = key;
      const asked = this.quiet < 3 ? this._askHistory(get, view, quantity) : null;
      this._status(status);
      await asked;
      if (layer !== null && (this.layerAnswer === null || (this.round % 2 === 0 && this.quiet < 3))) await this._askLayer(get, layer);
      this.round += 1;
    }

    async _askHistory(get, view, quantity) {
      const { history } = this;
      const run = history.run[view];
      const first = !run.known;
      // The small parts first, so that the heatmap, which is expensive, is drawn only once, when all values of its axis are known.
      let changed = history.addRun(await get(`run?view=${view}${history.since(run, view)}`));
      const asked = get(`layers?quantity=${quantity}&view=${view}${history.since(history.layers[quantity][view], view)}`);
      if (first) this.draw();
      changed = history.addLayers(await asked) || changed;
      if (history.status.values) changed = history.addValues(await get(`values?view=${view}${history.since(history.values[view], view)}`)) || changed;
      if (changed) this.draw();
    }

    async _askLayer(get, layer) {
      try {
        const answer = await get(`layer?name=${encodeURIComponent(layer)}`);
        if (this.state.layer === layer) this._layerShown(answer);
      } catch (error) {
        if (error.status !== 404) throw error;
        if (this.state.layer === layer) this.layer.fail("The run has no layer of this name.");
      }
    }

    _layerShown(answer) {
      this.layerAnswer = answer;
      this._drawLayer();
    }

    // Another run at the same address: nothing of the one before is kept.
    _renew(status) {
      const activations = page.history.OF_ACTIVATIONS.some((quantity) => (status.quantities || []).includes(quantity));
      byId("activations").hidden = !activations;
      // An address may name what this run does not have.
      if (!activations && page.history.OF_ACTIVATIONS.includes(this.state.quantity)) {
        this.state.quantity = "norm";
        this._buttons();
      }
      const before = this.history.status;
      if (before && (before.run !== status.run || before.started !== status.started)) {
        this.history.reset();
        this.layerAnswer = null;
      }
      this.history.status = status;
    }

    _status(status) {
      this.overview.show(status, Boolean(this.saved), this.history.largestNorm);
      this.charts.time.setTitle(status.optimizers > 1 ? "Time of a round of optimizers" : "Step time");
      this._marks(status.problems || []);
      if (this._acts()) this._redraw();
    }

    _acts() {
      const { status } = this.history;
      return page.marks.show((status && status.actions) || [], this.state.axis, (x) => page.charts.cursor.move(x, null));
    }

    _marks(problems) {
      const marks = new Map();
      for (const { layer, others, severity } of problems) for (const name of [layer, ...(others || [])]) if (typeof name === "string" && !marks.has(name)) marks.set(name, severity);
      this.heatmap.setMarks(marks);
    }

    draw() {
      this._acts();
      const { view, axis, quantity } = this.state;
      const run = this.history.run[view];
      const part = this.history.layers[quantity][view];
      const range = this._range(run, part);
      if (run.known) {
        const xs = axis === "time" ? run.times : run.steps;
        const of = run.stride > 1 ? `mean of ${numbers.count(run.stride)} records` : "";
        const set = (chart, ...keys) => chart.set(axis, range, xs, keys.map((key) => run[key]), keys.map((key) => run[`nonfinite_${key}`]), of);
        set(this.charts.norm, "norm", "norm_after_clip");
        set(this.charts.loss, "loss");
        set(this.charts.time, "step_seconds");
      }
      this._title();
      if (this.history.values[view].known) this.values.show(this.history.values[view], axis, range);
      if (part.known) this.heatmap.set(quantity, part, run, axis, range);
      byId("pictures").classList.toggle("low", part.known && this.heatmap.low);
      byId("heatmap-nothing").hidden = !part.known || part.times.length > 0;
      this._drawLayer();
      this._rows();
    }

    _drawLayer() {
      if (!this.layerAnswer) return;
      const { view, axis, quantity } = this.state;
      this.layer.show(this.layerAnswer, view, axis, this._range(this.history.run[view], this.history.layers[quantity][view]));
    }

    // What both know of; or what either does, where they hardly overlap.
    _range(run, part) {
      if (this.state.zoom) return this.state.zoom;
      const key = this.state.axis === "time" ? "times" : "steps";
      const ends = [run[key], part[key]].filter((xs) => xs && xs.length).map((xs) => [xs[0], xs[xs.length - 1]]);
      if (!ends.length) return [0, 1];
      const high = Math.max(...ends.map((end) => end[1]));
      const least = Math.min(...ends.map((end) => end[0]));
      const most = Math.max(...ends.map((end) => end[0]));
      if (this.state.view === "recent" && high - most > (high - least) / 4) return [most, high];
      const low = key === "steps" && least < high / 20 ? 0 : least;
      return high > low ? [low, high] : [low - 1, high + 1];
    }

    _rows() {
      const { heatmap } = this;
      if (!heatmap.part) return;
      const [shown, all] = [heatmap.rows.length, (heatmap.part.layers || []).length];
      const of = shown === all ? numbers.counted(all, "layer") : `${numbers.count(shown)} of ${numbers.counted(all, "layer")}`;
      text(byId("layer-count"), of);
      const button = byId("rows-mode");
      button.hidden = !heatmap.crowded;
      button.setAttribute("aria-pressed", String(heatmap.mode === "rows"));
      const samples = numbers.counted(heatmap.part.times.length, this.state.view === "whole" ? "interval" : "sample");
      byId("heatmap-overlay").setAttribute("aria-label", `${quantities.ALL[this.state.quantity].title} of ${of} at ${samples}`);
    }

    _tell(said) {
      window.clearTimeout(this.telling);
      this.telling = window.setTimeout(() => text(byId("announcer"), said), 120);
    }

    _live() {
      this.live = new page.live.Live((get) => this._ask(get), (connection, was) => this._connection(connection, was));
      window.setInterval(() => this._tick(), 1000);
      this.live.now();
    }

    _tick() {
      if (!this.live.connection.up) this._lost(this.live.connection);
    }

    _connection(connection, was) {
      document.documentElement.dataset.connection = connection.up ? "live" : "lost";
      byId("notice").hidden = connection.up;
      text(byId("connection"), connection.up ? "Live" : "No answer");
      if (!connection.up) {
        this._lost(connection);
        if (this.history.status) this.overview.show(this.history.status, true, this.history.largestNorm);
      } else if (was.failures) this._tell("The exporter answers again.");
    }

    _lost({ since, next, status }) {
      const why = status === 401 ? "The exporter needs a password (401): load the page again" : status === 429 || status === 503 ? `The exporter is busy (${status})` : status ? `The exporter answers with an error (${status})` : "The exporter does not answer";
      text(byId("notice-why"), `${why}, since ${numbers.clock(since / 1000)}. `);
      const ended = !status && this.history.status ? "The training may have ended. This page shows the last known values. " : "";
      text(byId("notice-what"), ended);
      text(byId("notice-next"), `Next attempt in ${Math.max(0, Math.ceil((next - Date.now()) / 1000))} s.`);
    }

    _showSaved() {
      const { saved, history } = this;
      document.documentElement.dataset.connection = "saved";
      for (const view of page.history.VIEWS) {
        if (saved.values && saved.values[view]) history.addValues(saved.values[view]);
        if (saved.run && saved.run[view]) history.addRun({ ...saved.run[view], view });
        for (const quantity of page.history.KEPT) {
          const grid = saved.layers && saved.layers[quantity] && saved.layers[quantity][view];
          if (grid) history.addLayers({ ...grid, view, quantity });
        }
      }
      this._renew(saved.status);
      this._status(saved.status);
      text(byId("connection"), `Saved at ${numbers.moment(numbers.parse(saved.status.now))}`);
      for (const gone of document.querySelectorAll("[data-live]")) gone.hidden = true;
      this.draw();
      this._savedLayer();
    }

    _savedLayer() {
      const { layer } = this.state;
      if (layer === null || this.layerAnswer) return;
      const known = this.saved.layer && Object.prototype.hasOwnProperty.call(this.saved.layer, layer) ? this.saved.layer[layer] : {};
      this._layerShown({ ...known, ...this.history.layer(layer) });
    }
  }

  function fromAddress() {
    const asked = new URLSearchParams(window.location.hash.slice(1));
    const found = {};
    for (const [key, values] of Object.entries(CHOICES)) if (values.includes(asked.get(key))) found[key] = asked.get(key);
    if (asked.get("layer") !== null) found.layer = asked.get("layer");
    return found;
  }

  function toAddress({ view, axis, quantity, layer }) {
    const kept = new URLSearchParams();
    const usual = { view: "whole", axis: "step", quantity: "norm" };
    for (const [key, value] of Object.entries({ view, axis, quantity })) if (value !== usual[key]) kept.set(key, value);
    if (layer !== null) kept.set("layer", layer);
    const said = kept.toString();
    try {
      window.history.replaceState(null, "", said ? `#${said}` : window.location.pathname + window.location.search);
    } catch (error) {
      // A file within a frame may have no address to change.
    }
  }

  function start() {
    const saved = byId("saved");
    page.app = new App(saved ? JSON.parse(saved.textContent) : null);
  }

  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})(window.TorchGrad = window.TorchGrad || {});

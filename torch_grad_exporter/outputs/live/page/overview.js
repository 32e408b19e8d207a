// The banner, the list of what is wrong, resources and the other ranks: everything that /api/v1/status says.
(function (page) {
  "use strict";

  const { numbers } = page;
  const { element, icon, link, byId, text } = page.dom;
  const SHOWN = 6;
  const FULL = 0.9;
  const RATES = 2;
  const NAMES = 8;

  const STATES = {
    initialising: ["Initialising", "hourglass"], training: ["Training", "play"], evaluating: ["Evaluating", "gauge"],
    stalled: ["Stalled", "hourglass"], finished: ["Finished", "check"], failed: ["Failed", "cross"],
  };
  const SEVERITIES = { critical: ["Critical", "cross"], warning: ["Warning", "warning"], info: ["Info", "info"] };

  function get(status, key) { return numbers.parse(status[key]); }

  function bad(value) { return value !== null && !Number.isFinite(value); }

  // As the exporter said: what has passed since is not known to be without a step.
  function age(status) {
    const last = get(status, "last_step");
    return last === null ? null : Math.max(0, get(status, "now") - last);
  }

  // `frozen`: the server does not answer any more, so that "ago" would be wrong.
  function lasted(status) {
    const [started, ended] = [get(status, "started"), get(status, "ended")];
    if (started === null) return "";
    if (ended !== null) return `ran for ${numbers.span(ended - started)}${status.ended_by ? `, ended by ${status.ended_by}` : ""}`;
    return `${status.frozen ? "was running" : "running"} for ${numbers.span(get(status, "now") - started)}`;
  }

  function ago(value, status) {
    if (!Number.isFinite(value)) return numbers.ABSENT;
    if (status.frozen) return numbers.clock(get(status, "last_step"));
    return value < 1.5 ? "just now" : numbers.span(value);
  }

  function agoNote(status) {
    if (status.frozen) return known(get(status, "last_step"), numbers.day);
    return age(status) >= 1.5 ? "ago" : "";
  }

  // Of the last sample, as its norm after clipping is: the last norm may be one that was observed at a later step.
  function normBefore(status) {
    const [last, after, coefficient] = [get(status, "global_norm"), get(status, "global_norm_after_clip"), get(status, "clip_coefficient")];
    return Number.isFinite(last) && Number.isFinite(after) && coefficient > 0 ? after / coefficient : last;
  }

  function normAfter(status) {
    const after = get(status, "global_norm_after_clip");
    if (after === null || bad(get(status, "global_norm"))) return "";
    return join(`${numbers.number(after, 3)} after clipping`, known(get(status, "last_sample_step"), (v) => `step\u00a0${numbers.count(v)}`));
  }

  function lossNote(status) {
    const spikes = get(status, "loss_spikes");
    if (spikes) return numbers.counted(spikes, "spike");
    return get(status, "loss") === null && get(status, "step") ? "exporter.observe(loss=…)" : "";
  }

  // Steps are what counts; elements without one are gradients of no optimizer. Of steps without a sample only the loss tells.
  const SPOILED = [["nonfinite_steps", "step"], ["nonfinite_elements", "element"], ["nonfinite_losses", "loss"]];

  function counts(status) { return SPOILED.map(([key, word]) => [get(status, key), word]).filter(([value]) => value); }

  function said([value, word]) { return word === "loss" && value !== 1 ? `${numbers.count(value)} losses` : numbers.counted(value, word); }

  function spoiledNote(status) {
    const skipped = get(status, "skipped_steps");
    return join(...counts(status).slice(1).map(said), skipped ? `${numbers.counted(skipped, "step")} skipped` : "");
  }

  // Without the first samples until these are paid back: the budget is judged after that.
  function overhead(status) {
    const ratio = get(status, "overhead_ratio");
    return ratio === null ? null : ratio - get(status, "startup_overhead_ratio");
  }

  function overheadNote(status) {
    const startup = get(status, "startup_overhead_ratio");
    return join(known(get(status, "overhead_budget_ratio"), (v) => `of ${numbers.percent(v)} budget`), startup ? `${numbers.percent(startup)} at start` : "");
  }

  // The tile has that of the first.
  function otherRates(status) {
    const others = Object.entries(status.learning_rates || {}).slice(1);
    const more = others.length > RATES ? [`${others.length - RATES} more`] : [];
    return join(...others.slice(0, RATES).map(([name, rate]) => `${name} ${numbers.number(numbers.parse(rate), 3, true)}`), ...more);
  }

  function spikesNote(status) {
    if (!get(status, "spikes") || status.largestNorm === null) return "of the norm";
    return `largest: at least ${numbers.number(status.largestNorm, 2)} × the median`;
  }

  // The problems of each rule and severity, in their order.
  function grouped(problems) {
    const groups = new Map();
    for (const problem of problems) {
      const key = `${problem.alert} ${problem.severity}`;
      groups.set(key, [...(groups.get(key) || []), problem]);
    }
    return [...groups.values()];
  }

  function join(...texts) { return texts.filter(Boolean).join(" · "); }

  function known(value, said) { return value === null ? "" : said(value); }

  // The worst first: a tile has a colour only for a problem that is listed below it.
  function level(tile, status) {
    const problem = (status.problems || []).find(({ alert, severity }) => (tile.of || []).includes(alert) && SEVERITIES[severity]);
    return problem ? problem.severity : "";
  }

  // Each: id, label, raw value, text, what is written below it, the alerts that are `of` it, what it is `about`, share of a bar.
  const TILES = [
    { id: "step", label: "Step", raw: (s) => get(s, "step"), format: numbers.count, note: (s) => known(get(s, "epoch"), (v) => `epoch ${numbers.number(v, 4, true)}`) },
    { id: "steps-per-second", label: "Steps/s", raw: (s) => get(s, "steps_per_second"), format: (v) => numbers.number(v, 3), note: (s) => known(get(s, "steps_per_second"), (v) => (v > 0 ? `${numbers.duration(1 / v)} a ${s.optimizers > 1 ? "round" : "step"}` : "")),
      about: "Of several optimizers, the steps of the one that takes the most; a round is one of these, with what the others do meanwhile." },
    { id: "loss", label: "Loss", raw: (s) => get(s, "loss"), format: (v) => numbers.number(v, 4), note: lossNote, of: ["TrainingNonFiniteLoss", "LossSpike"] },
    { id: "learning-rate", label: "Learning rate", raw: (s) => get(s, "learning_rate"), format: (v) => numbers.number(v, 3, true), note: otherRates },
    { id: "tokens-per-second", label: "Tokens/s", raw: (s) => get(s, "tokens_per_second"), format: numbers.compact, note: (s) => known(get(s, "samples_per_second"), (v) => `${numbers.compact(v)} samples/s`) },
    { id: "last-step", label: "Last step", raw: age, format: ago, note: agoNote, of: ["TrainingStalled", "TrainingNeverStarted"] },
    { id: "global-norm", label: "Gradient norm", raw: normBefore, format: (v) => numbers.number(v, 3), note: normAfter, of: ["TrainingNonFiniteGradients"] },
    { id: "nonfinite", label: "Non-finite", raw: (s) => (counts(s)[0] || [get(s, "nonfinite_steps")])[0], format: (v, s) => (v ? said(counts(s)[0]) : numbers.count(v)), note: spoiledNote, of: ["TrainingNonFiniteGradients", "TrainingNonFiniteLoss"],
      about: "Sampled steps whose gradients had a NaN or Inf, and all such losses, since the start. A step is skipped if the optimizer does not step, as after an overflow with a gradient scaler." },
    { id: "spikes", label: "Spikes", raw: (s) => get(s, "spikes"), format: numbers.count, note: spikesNote, of: ["GradientExploding"],
      about: "Samples whose gradient norm was far above those shortly before, since the start." },
    { id: "dead-layers", label: "Dead layers", raw: (s) => get(s, "dead_layers"), format: numbers.count, note: (s) => known(get(s, "layers"), (v) => `of ${numbers.count(v)}`), of: ["LayerDead"] },
    { id: "overhead", label: "Overhead", raw: overhead, format: numbers.percent, note: overheadNote, bar: (s) => overhead(s) / get(s, "overhead_budget_ratio") },
    { id: "interval", label: "Sampling", raw: (s) => get(s, "sampling_interval_steps"), format: (v) => (v === null ? numbers.ABSENT : v === 1 ? "each step" : `1 in ${numbers.count(v)}`), note: (s) => known(get(s, "last_sample_step"), (v) => `last at ${numbers.count(v)}`),
      about: "In how many steps gradients are measured. By default as often as the overhead budget allows." },
  ];

  class Overview {
    // `opened(layer)`: a problem was chosen.
    constructor(opened) {
      this.opened = opened;
      this.all = false;
      this.tiles = TILES.map((tile) => this._tile(tile));
    }

    _tile(tile) {
      const mark = element("span", { class: "mark" });
      const value = element("dd", { class: "value", "data-testid": tile.id }, numbers.ABSENT);
      const note = element("dd", { class: "note", "data-testid": `${tile.id}-note` });
      const box = element("div", { class: "tile", id: `tile-${tile.id}` }, element("dt", { title: tile.about }, tile.label, mark), value, note);
      const bar = tile.bar && element("span", { class: "fill" });
      if (bar) box.append(element("dd", { class: "bar", "aria-hidden": "true" }, bar));
      byId("tiles").append(box);
      return { tile, box, value, note, mark, bar };
    }

    // `frozen`: the state of the last answer. `largestNorm`: over the median.
    show(answer, frozen, largestNorm) {
      const status = { ...answer, frozen, largestNorm };
      this.status = status;
      this.saved = frozen;
      this._state(status);
      for (const one of this.tiles) this._fill(one, status);
      this._problems(status.problems || [], status.earlier || []);
      this._resources(status.resources || []);
      this._ranks(status.ranks || []);
    }

    _fill({ tile, box, value, note, mark, bar }, status) {
      const raw = tile.raw(status);
      text(value, tile.format(raw, status));
      value.dataset.value = raw === null ? "" : String(raw);
      text(note, tile.note ? tile.note(status) : "");
      const found = level(tile, status);
      if (box.dataset.level !== found) {
        box.dataset.level = found;
        mark.replaceChildren(...(found ? [icon(SEVERITIES[found][1]), element("span", { class: "unseen" }, SEVERITIES[found][0])] : []));
      }
      if (bar) bar.style.width = `${Math.min(100, Math.max(0, tile.bar(status) * 100 || 0))}%`;
    }

    _state(status) {
      const state = (status.problems || []).some((one) => one.alert === "TrainingStalled") ? "stalled" : status.state || "unknown";
      const [said, picture] = STATES[state] || [status.state || "Unknown", "info"];
      const badge = byId("state");
      if (badge.dataset.state !== state) {
        badge.dataset.state = state;
        badge.replaceChildren(icon(picture), element("span", { "data-testid": "state" }, said));
      }
      text(byId("run"), status.run || "–");
      const ranks = get(status, "world_size") > 1 ? `rank ${numbers.count(get(status, "rank"))} of ${numbers.count(get(status, "world_size"))}` : `rank ${numbers.count(get(status, "rank"))}`;
      text(byId("rank"), ranks);
      text(byId("host"), status.host || "");
      text(byId("since"), lasted(status));
      text(byId("version"), status.version ? `torch_grad_exporter ${status.version}` : "torch_grad_exporter");
      document.title = join(said, known(get(status, "step"), (v) => `step ${numbers.count(v)}`), status.run || "torch_grad_exporter");
    }

    _problems(problems, earlier) {
      const list = byId("problem-list");
      const key = JSON.stringify([problems.map(({ alert, severity, layer }) => [alert, severity, layer]), earlier, this.all]);
      if (key === this.problemsKey) {
        // Only numbers within: the rows stay, and the focus in them.
        const shown = grouped(problems);
        list.querySelectorAll("[data-alert] .text").forEach((words, k) => text(words, shown[k][0].text));
        return;
      }
      this.problemsKey = key;
      const groups = grouped(problems);
      byId("problems").dataset.count = String(groups.length);
      text(byId("problem-count"), groups.length ? String(groups.length) : "");
      const over = earlier.map((one) => this._earlier(one));
      if (!problems.length) {
        const here = get(this.status, "world_size") > 1 ? " on this rank" : "";
        list.replaceChildren(element("li", { class: "fine" }, icon("check"), `Nothing is wrong${over.length ? " now" : ""}${here} by the thresholds of the alert rules.`), ...over);
        return;
      }
      const rows = (this.all ? groups : groups.slice(0, SHOWN)).map((group) => this._problem(group));
      if (groups.length > SHOWN) rows.push(this._more(groups.length - SHOWN));
      list.replaceChildren(...rows, ...over);
    }

    _more(count) {
      const button = element("button", { type: "button", class: "plain", "aria-expanded": String(this.all) }, this.all ? "Show fewer" : `Show ${count} more`);
      button.addEventListener("click", () => {
        this.all = !this.all;
        this._problems(this.status.problems, this.status.earlier || []);
      });
      return element("li", { class: "more" }, button);
    }

    _earlier({ alert, text: words, first, last }) {
      const when = first === last ? `step ${numbers.count(first)}` : `steps ${numbers.count(first)} to ${numbers.count(last)}`;
      const body = element("span", { class: "body" }, element("span", { class: "severity" }, "Earlier"), element("span", { class: "alert" }, alert), element("span", { class: "text" }, `At ${when}: ${words}`));
      return element("li", { "data-severity": "info", "data-earlier": alert }, body);
    }

    // All that one rule found, of which the first is in words.
    _problem([problem, ...more]) {
      const severity = SEVERITIES[problem.severity] ? problem.severity : "info";
      const [said, picture] = SEVERITIES[severity];
      const badge = element("span", { class: "severity" }, icon(picture), said);
      const alert = element("span", { class: "alert" }, problem.alert);
      const words = element("span", { class: "text" }, problem.text);
      const steps = element("span", { class: "steps" }, problem.first_steps || "");
      const help = link(`runbook#${encodeURIComponent(String(problem.alert))}`, "More");
      help.classList.add("help");
      help.hidden = this.saved;
      let body = element("span", { class: "body" }, badge, alert, words);
      if (problem.layer !== null && problem.layer !== undefined) {
        body = element("button", { type: "button", class: "body", "data-layer": problem.layer }, badge, alert, words, element("span", { class: "go" }, "Show layer"));
        body.addEventListener("click", () => this.opened(problem.layer, body));
      }
      return element("li", { "data-severity": severity, "data-alert": problem.alert }, body, this._also(more), steps, help);
    }

    _also(problems) {
      const names = problems.flatMap(({ layer, others }) => [layer, ...(others || [])]).filter((name) => typeof name === "string");
      const buttons = names.slice(0, NAMES).map((name) => {
        const button = element("button", { type: "button", class: "plain", "data-layer": name }, name);
        button.addEventListener("click", () => this.opened(name, button));
        return button;
      });
      const rest = names.length > NAMES ? [`and ${numbers.count(names.length - NAMES)} more`] : [];
      return element("span", { class: "also" }, ...(names.length ? [`${numbers.counted(names.length, "more layer")}:`] : []), ...buttons, ...rest);
    }

    _resources(resources) {
      byId("resources").hidden = !resources.length;
      const rows = resources.map((one) => {
        const [value, limit] = [numbers.parse(one.value), numbers.parse(one.limit)];
        const said = one.unit === "ratio" || !limit ? numbers.unit(value, one.unit) : `${numbers.unit(value, one.unit)} of ${numbers.unit(limit, one.unit)}`;
        const row = element("li", {}, element("span", { class: "name" }, one.name), element("span", { class: "value" }, said));
        if (one.unit === "bytes" && value / limit >= FULL) row.dataset.level = "warning";
        if (limit && Number.isFinite(value)) row.append(this._meter(one.name, value / limit, said));
        return row;
      });
      byId("resource-list").replaceChildren(...rows);
    }

    _meter(name, share, said) {
      const fill = element("span", { class: "fill" });
      fill.style.width = `${Math.min(100, Math.max(0, share * 100))}%`;
      const attributes = { class: "bar", role: "meter", "aria-label": name, "aria-valuemin": 0, "aria-valuemax": 100, "aria-valuenow": Math.round(share * 100), "aria-valuetext": said };
      return element("span", attributes, fill);
    }

    _ranks(ranks) {
      const key = JSON.stringify(ranks);
      if (key === this.ranksKey) return;
      this.ranksKey = key;
      byId("ranks").hidden = !ranks.length;
      byId("rank-list").replaceChildren(...ranks.map((one) => element("li", {}, link(one.url, element("b", {}, `Rank ${one.rank}`), " ", element("span", {}, one.host || "")))));
    }
  }

  page.overview = { Overview };
})(window.TorchGrad = window.TorchGrad || {});

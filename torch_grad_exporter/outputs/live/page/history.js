// What the page knows of the run: keeps what came, and joins to it what is new.
(function (page) {
  "use strict";

  const { parse } = page.numbers;
  const RUN_KEYS = ["loss", "norm", "norm_after_clip", "step_seconds", "learning_rate"];
  const OF_GRADIENTS = ["norm", "zero_ratio", "dead_ratio", "zscore"];
  const OF_ACTIVATIONS = ["activation_rms", "activation_zero_ratio", "activation_dead_ratio"];
  const QUANTITIES = [...OF_GRADIENTS, ...OF_ACTIVATIONS];
  // As well, of a run with moments on.
  const MOMENTS = ["mean", "stddev"];
  const OF_LAYER = [...OF_GRADIENTS, ...MOMENTS];
  const KEPT = [...OF_LAYER, ...OF_ACTIVATIONS];
  const VIEWS = ["whole", "recent"];
  const MOST = { run: { recent: 1200, whole: 960 }, layers: { recent: 600, whole: 480 } };

  function empty() {
    return { first: 0, stride: 1, times: [], steps: [], version: 0, known: false };
  }

  function bytesOf(base64) {
    const text = window.atob(base64);
    const found = new Uint8Array(text.length);
    for (let at = 0; at < text.length; at += 1) found[at] = text.charCodeAt(at);
    return found;
  }

  // Columns of floats: NaN where there is no value, Infinity where the gradient was not finite, else the value or its logarithm,
  // which is -Infinity for 0.
  function decode(answer) {
    const width = answer.layers.length;
    const bytes = bytesOf(answer.codes);
    if (answer.scale === "raw") {
      const cells = new DataView(bytes.buffer);
      return answer.times.map((time, i) => Float32Array.from({ length: width }, (none, j) => cells.getFloat32(4 * (i * width + j), true)));
    }
    const low = parse(answer.low) || 0;
    const scale = ((parse(answer.high) || 0) - low) / 65533;
    const zero = answer.scale === "log" ? -Infinity : low;
    return answer.times.map((time, i) => {
      const column = new Float32Array(width);
      for (let j = 0; j < width; j += 1) {
        const at = 2 * (i * width + j);
        const code = bytes[at] | (bytes[at + 1] << 8);
        column[j] = code === 0 ? NaN : code === 65535 ? Infinity : code === 1 ? zero : low + (code - 1) * scale;
      }
      return column;
    });
  }

  // For each column null, or which layers had a record that is not finite.
  function decodeFlags(answer, columns) {
    const bytes = bytesOf(answer.nonfinite || "");
    const width = answer.layers.length;
    return columns.map((column, i) => {
      let found = null;
      for (let j = 0; j < width; j += 1) {
        const at = i * width + j;
        if (column[j] !== Infinity && !((bytes[at >> 3] << (at & 7)) & 128)) continue;
        found = found || new Uint8Array(width);
        found[j] = 1;
      }
      return found;
    });
  }

  // Which of so many places are in the list of places that are not finite.
  function flagsOf(places, length) {
    const found = new Array(length).fill(false);
    for (const at of places || []) found[at] = true;
    return found;
  }

  // Where in `kept` the answer begins: what lies behind is replaced. Null: it does not join, all is replaced.
  function joint(kept, answer, view) {
    const at = answer.first - kept.first;
    const joins = kept.known && answer.stride === kept.stride && at >= 0 && at <= kept.times.length;
    if (!joins) return null;
    return view === "recent" && at !== kept.times.length ? null : at;
  }

  function join(kept, answer, lists, view, most) {
    const at = joint(kept, answer, view);
    const changed = at === null || answer.times.length > 0;
    const replaced = at === null ? 0 : at;
    if (at === null) kept.first = answer.first;
    kept.stride = answer.stride;
    for (const [key, list] of Object.entries(lists)) kept[key] = (kept[key] || []).slice(0, replaced).concat(list);
    if (view === "recent" && kept.times.length > most) {
      const gone = kept.times.length - most;
      for (const key of Object.keys(lists)) kept[key] = kept[key].slice(gone);
      kept.first += gone;
    }
    kept.known = true;
    if (changed) kept.version += 1;
    return changed;
  }

  class History {
    constructor() { this.reset(); }

    reset() {
      this.status = null;
      this.run = { whole: empty(), recent: empty() };
      this.values = { whole: empty(), recent: empty() };
      this.layers = {};
      for (const quantity of KEPT) this.layers[quantity] = { whole: empty(), recent: empty() };
    }

    addRun(answer) {
      const lists = { times: answer.times, steps: answer.steps };
      for (const key of RUN_KEYS) {
        lists[key] = (answer[key] || answer.times.map(() => null)).map(parse);
        lists[`nonfinite_${key}`] = flagsOf((answer.nonfinite || {})[key], answer.times.length);
      }
      return join(this.run[answer.view], { ...answer, stride: answer.stride || 1 }, lists, answer.view, MOST.run[answer.view]);
    }

    // Numbers that the user logs: for each record its values by name, and the names of those of which one was not finite.
    addValues(answer) {
      const kept = this.values[answer.view];
      const flagged = new Map(Object.entries(answer.nonfinite || {}));
      kept.names = Object.keys(answer.values);
      const rows = answer.times.map((time, i) => new Map(kept.names.map((name) => [name, parse(answer.values[name][i])])));
      const marks = answer.times.map((time, i) => new Set(kept.names.filter((name) => (flagged.get(name) || []).includes(i))));
      return join(kept, answer, { times: answer.times, steps: answer.steps, rows, marks }, answer.view, MOST.layers[answer.view]);
    }

    addLayers(answer) {
      const kept = this.layers[answer.quantity][answer.view];
      kept.layers = answer.layers;
      kept.scale = answer.scale;
      kept.sharded = new Set(answer.sharded || []);
      const columns = decode(answer);
      const lists = { times: answer.times, steps: answer.steps, columns, flags: decodeFlags(answer, columns) };
      return join(kept, { ...answer, stride: answer.stride || 1 }, lists, answer.view, MOST.layers[answer.view]);
    }

    // What to ask for next: the record after the last, or the last bin again, as it may not have been full.
    since(kept, view) {
      if (!kept.known || !kept.times.length) return "";
      const next = kept.first + kept.times.length;
      return view === "recent" ? `&since=${next}` : `&since=${next - 1}&stride=${kept.stride}`;
    }

    // At least how much the largest norm of the run is over the median, null where there is none: old records are means.
    get largestNorm() {
      const [whole, recent] = [this.run.whole, this.run.recent].map((kept) => (kept.norm || []).filter(Number.isFinite));
      const norms = whole.sort((a, b) => a - b);
      const median = norms[norms.length >> 1];
      return median > 0 ? Math.max(...norms.slice(-1), ...recent) / median : null;
    }

    // One layer's history out of the grids, for a saved file; activations have records of their own.
    layer(name) {
      const found = {};
      for (const view of VIEWS) {
        const grids = OF_LAYER.map((quantity) => this.layers[quantity][view]);
        const known = grids.filter((kept) => kept.known && kept.layers.includes(name));
        if (!known.length) continue;
        const [{ times, steps, first, stride }] = known;
        found[view] = { times, steps, stride, nonfinite: {} };
        OF_LAYER.forEach((quantity, k) => {
          const kept = grids[k];
          const place = known.includes(kept) ? kept.layers.indexOf(name) : -1;
          // By the numbers of the records: the grids need not have been written at the same moment.
          const cell = (key, i) => ((kept[key] || [])[first + i - kept.first] || [])[place];
          found[view][quantity] = times.map((time, i) => plain(cell("columns", i), kept.scale));
          found[view].nonfinite[quantity] = times.map((time, i) => i).filter((i) => cell("flags", i));
        });
      }
      return found;
    }
  }

  function plain(value, scale) {
    if (value === undefined || Number.isNaN(value)) return null;
    return value === Infinity ? Infinity : scale === "log" ? 10 ** value : value;
  }

  page.history = { History, KEPT, QUANTITIES, OF_ACTIVATIONS, VIEWS, flagsOf };
})(window.TorchGrad = window.TorchGrad || {});

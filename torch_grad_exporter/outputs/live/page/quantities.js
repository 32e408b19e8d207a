// The quantities of a layer: what they are called, how they read, and which colours stand for which values.
(function (page) {
  "use strict";

  const { numbers } = page;

  function signed(value) {
    if (!Number.isFinite(value)) return numbers.number(value);
    return `${value > 0 ? "+" : ""}${value.toFixed(1)}`;
  }

  const ALL = {
    norm: {
      title: "Gradient norm", word: "norm", log: true, map: () => "viridis",
      about: "L2 norm of each layer's gradient before clipping, logarithmic.",
      format: (value) => numbers.number(value, 3), tick: (value) => numbers.logTick(value), bounds: ofNorms,
    },
    zero_ratio: {
      title: "Zero ratio", word: "zeros", map: () => "cividis",
      about: "Share of the gradient's elements that were exactly zero.",
      format: numbers.percent, tick: numbers.percent, bounds: ofRatios,
    },
    dead_ratio: {
      title: "Dead ratio", word: "dead units", map: () => "cividis",
      about: "Share of the output units whose gradient was zero in all recent samples.",
      format: numbers.percent, tick: numbers.percent, bounds: () => [0, 1],
    },
    zscore: {
      title: "z-score", word: "z-score", bySize: true, map: () => (page.theme.dark ? "divergingDark" : "divergingLight"),
      about: "Distance of the norm from the layer's own median, in robust sigmas; full colour from 6 on, which is a spike.",
      format: (value) => `${signed(value)}${Number.isFinite(value) ? "\u00a0σ" : ""}`, tick: (value) => signed(value).replace(".0", ""), bounds: () => [-6, 6],
    },
  };

  // Of a layer alone, and only with moments on: no heatmap, as those of one layer may be far below those of another.
  const MOMENTS = {
    mean: { title: "Mean of the gradient's elements", word: "mean", format: (value) => numbers.number(value, 3) },
    stddev: { title: "Standard deviation of the gradient's elements", word: "standard deviation", format: (value) => numbers.number(value, 3) },
  };
  ALL.activation_rms = {
    title: "Activation RMS", word: "RMS", log: true, map: () => "viridis",
    about: "Root mean square of each module's output, logarithmic.",
    format: ALL.norm.format, tick: ALL.norm.tick, bounds: ofNorms,
  };
  ALL.activation_zero_ratio = { ...ALL.zero_ratio, title: "Activation zeros", about: "Share of the elements of a module's output that were exactly zero." };
  ALL.activation_dead_ratio = { ...ALL.dead_ratio, title: "Activation dead ratio", about: "Share of a module's output units that were zero in every element of the sample." };

  // From the half decade below nearly all values to the one above: a single layer that has died does not flatten the rest.
  function ofNorms(sorted) {
    if (!sorted.length) return [-6, 0];
    const at = (share) => sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
    const low = Math.floor(2 * at(0.005)) / 2;
    return [low, Math.max(low + 1, Math.ceil(2 * at(0.999)) / 2)];
  }

  function ofRatios(sorted) {
    const high = sorted.length ? sorted[sorted.length - 1] : 1;
    return [0, [0.01, 0.02, 0.05, 0.1, 0.2, 0.5].find((bound) => bound >= high) || 1];
  }

  const PART = "this rank's part";

  // What a value is called: of a sharded layer a rank has but its own part of the gradient.
  function word(quantity, sharded) {
    return quantity === "norm" && sharded ? `norm of ${PART}` : ALL[quantity].word;
  }

  // The title of the picture, of whose layers so many are sharded.
  function title(quantity, sharded, all) {
    const found = `${ALL[quantity].title} by layer`;
    if (quantity !== "norm" || !sharded) return found;
    return sharded === all ? `${found} (${PART})` : `${found} (${numbers.count(sharded)} of ${numbers.count(all)}: ${PART})`;
  }

  const SAMPLE = 40000;

  // {low, high} of the colours and {least, most} of the finite values.
  function extent(quantity, columns) {
    let least = Infinity;
    let most = -Infinity;
    let all = 0;
    for (const column of columns) {
      all += column.length;
      for (const value of column) {
        if (value < least) least = value;
        if (value > most && value !== Infinity) most = value;
      }
    }
    const every = Math.max(1, Math.floor(all / SAMPLE));
    const some = [];
    let at = 0;
    for (const column of columns) {
      for (; at < column.length; at += every) if (Number.isFinite(column[at])) some.push(column[at]);
      at -= column.length;
    }
    if (Number.isFinite(most)) some.push(most);
    const [low, high] = ALL[quantity].bounds(Float32Array.from(some).sort());
    return { low, high, least, most };
  }

  page.quantities = { ALL, MOMENTS, PART, extent, signed, title, word };
})(window.TorchGrad = window.TorchGrad || {});

// Names of layers next to the rows of the heatmap: which of them there is room for, and how long ones are shortened.
(function (page) {
  "use strict";

  // What all names begin with, up to a point: "model." of "model.embed" and "model.norm".
  function commonPrefix(names) {
    if (names.length < 2) return "";
    let prefix = names[0];
    for (const name of names) {
      let k = 0;
      while (k < prefix.length && prefix[k] === name[k]) k += 1;
      prefix = prefix.slice(0, k);
      if (!prefix) break;
    }
    return prefix.slice(0, prefix.lastIndexOf(".") + 1);
  }

  // The end of a name says more than its beginning.
  function shortened(context, name, width) {
    if (context.measureText(name).width <= width) return name;
    let low = 1;
    let high = Math.min(name.length, 200);
    const cut = (kept) => {
      const head = kept < 20 ? 0 : Math.floor(kept * 0.35);
      return `${name.slice(0, head)}…${name.slice(name.length - (kept - head))}`;
    };
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (context.measureText(cut(middle)).width <= width) low = middle;
      else high = middle - 1;
    }
    return cut(low);
  }

  // Places of the rows that get a label, at least `distance` apart: first those that matter, then evenly spread ones.
  function chosen(bands, height, important, distance) {
    const taken = [];
    const centre = (band) => Math.min(height - distance / 2, Math.max(distance / 2, (band.from + band.to) / 2));
    const free = (y) => taken.every((one) => Math.abs(one.y - y) >= distance);
    const take = (band, row) => {
      const y = centre(band);
      if (!free(y)) return;
      taken.push({ y, row });
    };
    for (const band of bands) for (let row = band.first; row <= band.last; row += 1) if (important(row)) take(band, row);
    let next = -Infinity;
    for (const band of bands) {
      if (centre(band) < next) continue;
      take(band, band.first);
      next = centre(band) + distance;
    }
    return taken;
  }

  page.labels = { commonPrefix, shortened, chosen };
})(window.TorchGrad = window.TorchGrad || {});

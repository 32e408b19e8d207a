// From columns of values to pixels: which columns and rows fall on a pixel, the largest of them, and its colour. With the values there
// are flags: for each column null, or an array that says which rows had something that is not finite among what became their value.
(function (page) {
  "use strict";

  const NONE = -1;
  const NONFINITE = 256;

  // Columns for which what has no value keeps its last one: models that are sampled in turns would be a chessboard.
  const KEPT = 8;

  // From how many times the median on a norm is a spike, and of how many norms on either side that is the median.
  const SPIKE = 10;
  const AROUND = 20;

  const NEAR = 4;
  const PAUSE = 6;

  // The usual distance about a column: the median of those to its neighbours, so that a run may be slow here and fast there.
  function usual(gaps, k) {
    const near = gaps.slice(Math.max(0, k - NEAR), k + NEAR).sort((a, b) => a - b);
    return near[near.length >> 1] || 1;
  }

  // Columns meet halfway; with `pauses` not across what is far longer than is usual on either side, which stays a gap. The first and the
  // last reach for 1.5 times the usual distance: so the last one stands until the next is due.
  function edges(xs, pauses) {
    const gaps = [];
    for (let k = 1; k < xs.length; k += 1) gaps.push(xs[k] - xs[k - 1]);
    const half = xs.map((x, k) => usual(gaps, k) / 2);
    const meet = (k) => !pauses || gaps[k] <= 2 * PAUSE * Math.max(half[k], half[k + 1]);
    const reach = (k, gap) => (gap < 0 || gap >= gaps.length ? 3 * half[k] : meet(gap) ? gaps[gap] / 2 : half[k]);
    return xs.map((x, k) => [x - reach(k, k - 1), x + reach(k, k)]);
  }

  // For each pixel its first and last column: Int32Arrays, NONE where there is none. `pauses`: whether a long distance stays a gap.
  function columnsOfPixels(xs, range, width, pauses) {
    const first = new Int32Array(width).fill(NONE);
    const last = new Int32Array(width).fill(NONE);
    const scale = width / (range[1] - range[0] || 1);
    edges(xs, pauses).forEach(([left, right], k) => {
      const begin = Math.round((left - range[0]) * scale);
      const end = Math.max(begin + 1, Math.round((right - range[0]) * scale));
      for (let at = Math.max(0, begin); at < Math.min(width, end); at += 1) {
        if (first[at] === NONE) first[at] = k;
        last[at] = k;
      }
    });
    return { first, last };
  }

  // Bands of pixels from top to bottom: {from, to} pixels and {first, last} places among the shown rows.
  function bands(count, offset, rowHeight, height) {
    const found = [];
    if (rowHeight >= 1) {
      const gap = rowHeight >= 7 ? 1 : 0;
      for (let row = Math.floor(offset / rowHeight); row < count; row += 1) {
        const from = Math.round(row * rowHeight - offset);
        if (from >= height) break;
        const to = Math.min(height, Math.round((row + 1) * rowHeight - offset) - gap);
        found.push({ from: Math.max(0, from), to, first: row, last: row });
      }
      return found;
    }
    for (let at = 0; at < height; at += 1) {
      const first = Math.floor((at + offset) / rowHeight);
      const last = Math.min(count - 1, Math.max(first, Math.ceil((at + 1 + offset) / rowHeight) - 1));
      if (first < count) found.push({ from: at, to: at + 1, first, last });
    }
    return found;
  }

  // The largest value (or the farthest from zero) of some columns and rows, and where it is. NaN: there is none.
  function largest(columns, first, last, rows, begin, end, bySize) {
    let best = NaN;
    let column = NONE;
    let row = NONE;
    for (let k = first; k <= last; k += 1) {
      const values = columns[k];
      for (let r = begin; r <= end; r += 1) {
        const value = values[rows[r]];
        if (value !== value || value === undefined) continue;
        if (best !== best || (bySize ? Math.abs(value) > Math.abs(best) : value > best)) {
          best = value;
          column = k;
          row = r;
        }
      }
    }
    return { value: best, column, row };
  }

  // The same, for all bands at once and without where; fast, for each pixel of a picture.
  function pool(columns, first, last, rows, all, bySize, out) {
    for (let b = 0; b < all.length; b += 1) {
      const { first: begin, last: end } = all[b];
      let best = NaN;
      for (let k = first; k <= last; k += 1) {
        const values = columns[k];
        for (let r = begin; r <= end; r += 1) {
          const value = values[rows[r]];
          if (value !== value || value === undefined) continue;
          if (best !== best || (bySize ? Math.abs(value) > Math.abs(best) : value > best)) best = value;
        }
      }
      out[b] = best;
    }
  }

  // The last column up to k in which a row has a value, if it is near; else NONE.
  function lastKnown(columns, k, row) {
    for (let at = k; at >= 0 && k - at <= KEPT; at -= 1) if (columns[at][row] === columns[at][row] && columns[at][row] !== undefined) return at;
    return NONE;
  }

  // The first flagged cell of some columns and rows: {column, row}, null where there is none.
  function flagged(flags, first, last, rows, begin, end) {
    for (let k = first; k <= last; k += 1) {
      const marks = flags[k];
      if (!marks) continue;
      for (let r = begin; r <= end; r += 1) if (marks[rows[r]]) return { column: k, row: r };
    }
    return null;
  }

  // The pixels from left to right in whose columns any of the rows is flagged, {from, to} each, and the bands with a flag in sight.
  function strips(flags, spans, rows, all) {
    const bad = flags.map((marks) => marks !== null && rows.some((row) => marks[row]));
    const across = [];
    const seen = new Set();
    spans.first.forEach((first, at) => {
      let any = false;
      for (let k = first; first !== NONE && k <= spans.last[at]; k += 1) if (bad[k]) { any = true; seen.add(k); }
      const before = across[across.length - 1];
      if (any && before && before.to === at) before.to = at + 1;
      else if (any) across.push({ from: at, to: at + 1 });
    });
    const inSight = flags.map((marks, k) => (seen.has(k) ? marks : null)).filter((marks) => marks !== null);
    const beside = all.filter((band) => flagged(inSight, 0, inSight.length - 1, rows, band.first, band.last));
    return { across, beside };
  }

  // The places of spikes that no sample shows: norms of the run far above those around them, and above the layers' (logarithms) nearby.
  function missed({ norms, xs }, columns, columnXs) {
    const there = norms.map((norm, k) => k).filter((k) => Number.isFinite(norms[k]));
    const median = (i) => {
      const near = there.slice(Math.max(0, i - AROUND), i + AROUND + 1).map((k) => norms[k]).sort((a, b) => a - b);
      return near[near.length >> 1];
    };
    const total = (column) => Math.sqrt(column.reduce((sum, value) => (value < Infinity ? sum + 10 ** (2 * value) : sum), 0));
    const spikes = there.filter((k, i) => norms[k] > SPIKE * median(i));
    return spikes.filter((k) => columns.length && norms[k] > SPIKE * total(columns[page.charts.nearest(columnXs, xs[k])]));
  }

  function place(value, low, high) {
    if (value !== value) return NONE;
    if (value === Infinity) return NONFINITE;
    const at = Math.round(((value - low) / (high - low)) * 255);
    return at < 0 ? 0 : at > 255 ? 255 : at;
  }

  // How much of a cell's lower edge says that it is flagged, in pixels: none of one that is too small for both.
  function foot(wide, high, ratio) {
    return wide >= 3 * ratio && high >= 4 * ratio ? Math.max(1, Math.min(Math.round(3 * ratio), high >> 2)) : 0;
  }

  // Paints `pixels` (Uint32Array of width x height), which has the ground's colour already. `ratio`: pixels of the picture in one of the page.
  function paint(pixels, width, { columns, flags }, spans, rows, all, colour, ratio) {
    const values = new Float32Array(all.length);
    const kept = all.map(() => ({ found: NONE, until: NONE }));
    let at = 0;
    while (at < width) {
      const first = spans.first[at];
      const last = spans.last[at];
      let end = at + 1;
      while (end < width && spans.first[end] === first && spans.last[end] === last) end += 1;
      if (first !== NONE) {
        pool(columns, first, last, rows, all, colour.bySize, values);
        const some = flags.slice(first, last + 1).some((marks) => marks !== null);
        for (let b = 0; b < all.length; b += 1) {
          const found = place(values[b], colour.low, colour.high);
          const { from, to } = all[b];
          if (found === NONE) {
            if (kept[b].until < first) continue;
            for (let y = from; y < to; y += 1) pixels.fill(colour.pale[kept[b].found], y * width + at, y * width + end);
            continue;
          }
          kept[b] = { found, until: found === NONFINITE ? NONE : last + KEPT };
          const bad = some && found !== NONFINITE && flagged(flags, first, last, rows, all[b].first, all[b].last);
          const top = to - (bad ? foot(end - at, to - from, ratio) : 0);
          const pixel = found === NONFINITE ? colour.nonfinite : colour.table[found];
          for (let y = from; y < to; y += 1) pixels.fill(y < top ? pixel : colour.nonfinite, y * width + at, y * width + end);
        }
      }
      at = end;
    }
  }

  page.grid = { NONE, columnsOfPixels, bands, largest, lastKnown, flagged, strips, missed, paint };
})(window.TorchGrad = window.TorchGrad || {});

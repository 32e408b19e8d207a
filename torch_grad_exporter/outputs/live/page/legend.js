// What the colours of the heatmap mean; and the words next to its pointer.
(function (page) {
  "use strict";

  const { quantities, numbers } = page;
  const { element } = page.dom;
  const BAR = 10;

  function css(pixel) {
    return `rgb(${pixel & 255}, ${(pixel >> 8) & 255}, ${(pixel >> 16) & 255})`;
  }

  function ticksOf(quantity, colour) {
    const spec = quantities.ALL[quantity];
    if (spec.log) return numbers.logTicks(colour.low, colour.high, 6).filter((tick) => Number.isInteger(tick) || colour.high - colour.low < 2.2);
    return quantity === "zscore" ? [-6, -3, 0, 3, 6] : numbers.ticks(colour.low, colour.high, 4);
  }

  // A bar with its ticks. An arrow at an end: values beyond it have the colour of the end.
  function draw(canvas, quantity, colour) {
    const spec = quantities.ALL[quantity];
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth || 260, 30];
    Object.assign(canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    const [left, right] = [18, width - 18];
    for (let x = left; x < right; x += 1) {
      context.fillStyle = css(colour.table[Math.floor(((x - left) / (right - left - 1)) * 255)]);
      context.fillRect(x, 2, 1, BAR);
    }
    if (colour.least < colour.low) arrow(context, left - 1, -7, css(colour.table[0]));
    if (colour.most > colour.high) arrow(context, right + 1, 7, css(colour.table[255]));
    context.fillStyle = page.theme.colour("muted");
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "center";
    for (const tick of ticksOf(quantity, colour)) {
      const x = left + ((tick - colour.low) / (colour.high - colour.low)) * (right - left);
      context.fillRect(Math.round(x) - (tick === colour.high ? 1 : 0), BAR + 2, 1, 3);
      context.fillText(spec.tick(tick), x, BAR + 16);
    }
    const ends = [colour.low, colour.high].map((end) => spec.format(spec.log ? 10 ** end : end));
    canvas.setAttribute("aria-label", `Colours from ${ends[0]} to ${ends[1]}${spec.log ? ", logarithmic" : ""}`);
  }

  function arrow(context, x, length, fill) {
    context.fillStyle = fill;
    context.beginPath();
    context.moveTo(x, 2);
    context.lineTo(x + length, 2 + BAR / 2);
    context.lineTo(x, 2 + BAR);
    context.fill();
  }

  function fill(tip, about) {
    const rows = [element("strong", { class: "name" }, about.layer)];
    if (about.text !== undefined) {
      rows.push(element("span", { class: about.bad ? "reading bad" : "reading" }, element("span", {}, `${about.word} `), element("b", {}, about.text)));
      if (about.also) rows.push(element("span", { class: "bad" }, element("b", {}, about.also)));
      rows.push(element("span", { class: "where" }, `step ${numbers.count(about.step)} · ${numbers.moment(about.time)}`));
    }
    if (about.of) rows.push(element("span", { class: "where" }, about.of));
    tip.replaceChildren(...rows);
  }

  // Next to the point, within the frame.
  function place(tip, frame, left, top) {
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    const x = left + 14 + width > frame.clientWidth ? Math.max(0, left - 14 - width) : left + 14;
    const y = top + 14 + height > frame.clientHeight ? Math.max(0, top - 14 - height) : top + 14;
    tip.style.transform = `translate(${Math.round(x)}px, ${Math.round(y)}px)`;
  }

  page.legend = { draw };
  page.tooltip = { fill, place };
})(window.TorchGrad = window.TorchGrad || {});

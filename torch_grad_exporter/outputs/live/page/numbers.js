// Numbers and times as engineers read them, and the ticks of axes.
(function (page) {
  "use strict";

  const ABSENT = "–";
  const SPACE = "\u00a0";

  // JSON has no such numbers: they come as texts. null is a value that there is not.
  function parse(value) {
    if (typeof value === "number") return value;
    if (value === "NaN") return NaN;
    if (value === "Infinity") return Infinity;
    if (value === "-Infinity") return -Infinity;
    return null;
  }

  function odd(value) {
    if (value === null || value === undefined) return ABSENT;
    if (Number.isNaN(value)) return "NaN";
    return value > 0 ? "Inf" : "-Inf";
  }

  function grouped(text) {
    const [whole, rest] = text.split(".");
    const groups = whole.replace(/\B(?=(\d{3})+$)/g, ",");
    return rest === undefined ? groups : `${groups}.${rest}`;
  }

  // 1234567.8 with 4 digits is 1,234,568; what is very large or small has an exponent.
  function number(value, digits = 4, strip = false) {
    if (!Number.isFinite(value)) return odd(value);
    if (value === 0) return "0";
    const size = Math.abs(value);
    if (size < 1e-3 || size >= 1e7) return exponent(value, Math.min(digits, 3), strip);
    const places = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
    const text = value.toFixed(places);
    return grouped(strip && text.includes(".") ? text.replace(/\.?0+$/, "") : text);
  }

  function exponent(value, digits, strip) {
    const [mantissa, power] = value.toExponential(digits - 1).split("e");
    const short = strip && mantissa.includes(".") ? mantissa.replace(/\.?0+$/, "") : mantissa;
    return `${short}e${Number(power)}`;
  }

  function count(value) {
    if (!Number.isFinite(value)) return odd(value);
    return Math.abs(value) < 1e9 ? grouped(String(Math.round(value))) : compact(value);
  }

  // 1 step, 2 steps.
  function counted(value, word) { return `${count(value)} ${word}${value === 1 ? "" : "s"}`; }

  // 12.5 k, for axes and rates.
  function compact(value) {
    if (!Number.isFinite(value)) return odd(value);
    const size = Math.abs(value);
    const units = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];
    for (const [unit, letter] of units) {
      if (size >= unit) return `${trimmed(value / unit, 4)}${SPACE}${letter}`;
    }
    return trimmed(value, 4);
  }

  function trimmed(value, digits) {
    return String(Number(value.toPrecision(digits)));
  }

  function percent(value) {
    if (!Number.isFinite(value)) return odd(value);
    const hundredths = value * 100;
    const digits = Math.abs(hundredths) >= 100 ? 4 : Math.abs(hundredths) >= 0.1 ? 3 : 2;
    return `${hundredths === 0 ? "0" : trimmed(hundredths, digits)}${SPACE}%`;
  }

  function bytes(value) {
    if (!Number.isFinite(value)) return odd(value);
    const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let place = 0;
    let size = value;
    while (Math.abs(size) >= 1000 && place < units.length - 1) {
      size /= 1024;
      place += 1;
    }
    return `${trimmed(size, 3)}${SPACE}${units[place]}`;
  }

  function duration(seconds) {
    if (!Number.isFinite(seconds)) return odd(seconds);
    if (seconds === 0) return `0${SPACE}s`;
    if (Math.abs(seconds) < 1e-3) return `${trimmed(seconds * 1e6, 3)}${SPACE}µs`;
    if (Math.abs(seconds) < 1) return `${trimmed(seconds * 1e3, 3)}${SPACE}ms`;
    if (seconds < 120) return `${trimmed(seconds, 3)}${SPACE}s`;
    return span(seconds);
  }

  // Whole seconds and above: 4 s, 12 min 4 s, 3 h 12 min, 2 d 4 h.
  function span(seconds) {
    if (!Number.isFinite(seconds)) return odd(seconds);
    const all = Math.max(0, Math.floor(seconds));
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = Math.max(0, parts.findIndex(([unit]) => all >= unit));
    if (all === 0) return `0${SPACE}s`;
    const head = Math.floor(all / parts[first][0]);
    const texts = [`${head}${SPACE}${parts[first][1]}`];
    const next = parts[first + 1];
    const rest = next && Math.floor((all % parts[first][0]) / next[0]);
    if (rest) texts.push(`${rest}${SPACE}${next[1]}`);
    return texts.join(SPACE);
  }

  function two(value) {
    return String(value).padStart(2, "0");
  }

  function clock(time) {
    const at = new Date(time * 1000);
    return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  }

  function day(time) {
    const at = new Date(time * 1000);
    return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  }

  function moment(time) {
    return Number.isFinite(time) ? `${day(time)} ${clock(time)}` : odd(time);
  }

  const UNITS = {
    bytes,
    ratio: percent,
    celsius: (value) => `${number(value, 3, true)}${SPACE}°C`,
    watts: (value) => `${number(value, 3, true)}${SPACE}W`,
    cores: (value) => `${number(value, 3, true)}${SPACE}${value === 1 ? "core" : "cores"}`,
    count,
  };

  function unit(value, name) {
    if (!Number.isFinite(value)) return odd(value);
    return (UNITS[name] || ((plain) => number(plain, 4, true)))(value);
  }

  // At most about `most` round numbers within low and high.
  function ticks(low, high, most) {
    if (!(high > low)) return [low];
    const raw = (high - low) / Math.max(1, most);
    const power = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].map((by) => by * power).find((by) => by >= raw * 0.999);
    const found = [];
    for (let at = Math.ceil(low / step - 1e-9); at * step <= high + step * 1e-9; at += 1) found.push(Number((at * step).toPrecision(12)));
    return found;
  }

  const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

  // Ticks of Unix times, round in local time.
  function timeTicks(low, high, most) {
    const raw = (high - low) / Math.max(1, most);
    const step = STEPS.find((by) => by >= raw) || Math.ceil(raw / 86400) * 86400;
    const offset = -new Date(low * 1000).getTimezoneOffset() * 60;
    const found = [];
    for (let at = Math.ceil((low + offset) / step) * step - offset; at <= high; at += step) found.push(at);
    return found;
  }

  function timeTick(time, gap) {
    if (gap >= 86400) return day(time).slice(5);
    const text = clock(time);
    if (gap < 60) return text;
    return text.startsWith("00:00") ? day(time).slice(5) : text.slice(0, 5);
  }

  // Ticks of a logarithmic axis, as logarithms: decades, or 1-2-5 within a few.
  function logTicks(low, high, most) {
    const decades = [];
    const every = Math.max(1, Math.ceil((high - low) / Math.max(1, most)));
    for (let at = Math.ceil(low - 1e-9); at <= high + 1e-9; at += 1) if (at % every === 0) decades.push(at);
    if (high - low > 2.2) return decades;
    const found = [];
    for (let at = Math.floor(low); at <= high; at += 1) {
      for (const by of [1, 2, 5]) {
        const tick = at + Math.log10(by);
        if (tick >= low - 1e-9 && tick <= high + 1e-9) found.push(tick);
      }
    }
    if (found.length < 3) return ticks(10 ** low, 10 ** high, most).filter((value) => value > 0).map(Math.log10);
    return found.length <= most + 2 ? found : decades;
  }

  // A power of ten as text: 1e-6, 0.01, 100.
  function logTick(power) {
    const value = 10 ** power;
    return power >= -2.01 && power < 4 ? trimmed(value, 4) : exponent(value, 3, true);
  }

  page.numbers = {
    ABSENT, parse, number, count, counted, compact, percent, bytes, duration, span, clock, day, moment, unit, ticks, timeTicks, timeTick, logTicks, logTick,
  };
})(window.TorchGrad = window.TorchGrad || {});

// Perceptually uniform colour maps as tables of 256 pixels.
(function (page) {
  "use strict";

  // viridis and cividis of matplotlib (CC0), at equal distances.
  const MAPS = {
    viridis: ["440154", "482475", "414487", "355f8d", "2a788e", "21918c", "22a884", "44bf70", "7ad151", "bddf26", "fde725"],
    cividis: ["00224e", "123570", "3b496c", "575d6d", "707173", "8a8678", "a59c74", "c3b369", "e1cc55", "fee838"],
    // Two sides of equal lightness about a middle that is near the page's own ground.
    divergingLight: ["053061", "1f66ac", "4694c5", "92c5de", "d3e5f0", "e4e7ea", "fbe0c6", "f5b477", "d97f2b", "a85008", "5f2b02"],
    divergingDark: ["a6d8ff", "6bb3ea", "3f8bc4", "2b6592", "254863", "333c46", "61441f", "8f5d1a", "c07f26", "e6a94c", "ffd79b"],
  };

  function channels(hex) {
    return [0, 2, 4].map((at) => parseInt(hex.slice(at, at + 2), 16));
  }

  function pixel(red, green, blue) {
    return ((255 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
  }

  function fromCss(text) {
    return pixel(...channels(text.replace("#", "")));
  }

  function table(name) {
    const stops = MAPS[name].map(channels);
    const found = new Uint32Array(256);
    for (let at = 0; at < 256; at += 1) {
      const place = (at / 255) * (stops.length - 1);
      const below = Math.min(Math.floor(place), stops.length - 2);
      const share = place - below;
      const mixed = stops[below].map((channel, k) => Math.round(channel + (stops[below + 1][k] - channel) * share));
      found[at] = pixel(...mixed);
    }
    return found;
  }

  // The mean of two pixels, channel by channel.
  function mean(one, other) {
    return (((one & 0xfefefefe) >>> 1) + ((other & 0xfefefefe) >>> 1)) | 0xff000000;
  }

  // A quarter of the way to the ground.
  function pale(pixels, ground) { return pixels.map((one) => mean(one, mean(one, ground))); }

  const tables = {};

  page.colours = {
    fromCss,
    pale,
    table(name) {
      tables[name] = tables[name] || table(name);
      return tables[name];
    },
  };
})(window.TorchGrad = window.TorchGrad || {});

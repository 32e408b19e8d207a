// Elements, of texts that are never anything but text.
(function (page) {
  "use strict";

  function element(name, attributes = {}, ...children) {
    const found = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== null && value !== undefined && value !== false) found.setAttribute(key, value === true ? "" : value);
    }
    found.append(...children);
    return found;
  }

  // A picture of index.html's own.
  function icon(name) {
    const space = "http://www.w3.org/2000/svg";
    const found = document.createElementNS(space, "svg");
    const use = document.createElementNS(space, "use");
    use.setAttribute("href", `#icon-${name}`);
    found.setAttribute("class", "icon");
    found.setAttribute("aria-hidden", "true");
    found.append(use);
    return found;
  }

  // Only an address of the web becomes a link.
  function link(url, ...children) {
    let safe = false;
    try {
      safe = ["http:", "https:"].includes(new URL(url, document.baseURI).protocol);
    } catch (error) {
      safe = false;
    }
    return safe ? element("a", { href: url, rel: "noreferrer noopener" }, ...children) : element("span", {}, ...children);
  }

  function byId(id) {
    return document.getElementById(id);
  }

  // Writes only what has changed, so that a selection of text and a screen reader are left in peace.
  function text(target, value) {
    if (target.textContent !== value) target.textContent = value;
  }

  page.dom = { element, icon, link, byId, text };
})(window.TorchGrad = window.TorchGrad || {});

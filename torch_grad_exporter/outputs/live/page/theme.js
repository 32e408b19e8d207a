// Dark or light: what the visitor chose, else what the system prefers. In the head, so that nothing flashes.
(function (page) {
  "use strict";

  const KEY = "torch_grad_exporter.theme";
  const CHOICES = ["auto", "light", "dark"];
  const system = window.matchMedia("(prefers-color-scheme: dark)");
  const listeners = [];

  // Storage may be forbidden: by the browser's settings, or in a file that was opened from disk.
  function stored() {
    try {
      const choice = window.localStorage.getItem(KEY);
      return CHOICES.includes(choice) ? choice : "auto";
    } catch (error) {
      return "auto";
    }
  }

  function store(choice) {
    try {
      window.localStorage.setItem(KEY, choice);
    } catch (error) {
      // It is then kept until the page is closed.
    }
  }

  let choice = stored();

  function apply() {
    const dark = choice === "dark" || (choice === "auto" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    for (const listener of listeners) listener();
  }

  system.addEventListener("change", apply);
  apply();

  page.theme = {
    get choice() { return choice; },
    get dark() { return document.documentElement.dataset.theme === "dark"; },
    next() {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      store(choice);
      apply();
    },
    onChange(listener) { listeners.push(listener); },
    // The value of a colour of app.css, for what is drawn on a canvas.
    colour(name) { return window.getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim(); },
  };
})(window.TorchGrad = window.TorchGrad || {});

// Asks the server for what is new, one request after the other, and tells when it does not answer.
(function (page) {
  "use strict";

  const PERIOD = 2000;
  const PATIENCE = 10000;
  const LONGEST = 60000;

  class Refused extends Error {
    constructor(status, after) {
      super(`HTTP ${status}`);
      this.status = status;
      this.after = after;
    }
  }

  async function get(path) {
    const abort = new AbortController();
    const timer = window.setTimeout(() => abort.abort(), PATIENCE);
    try {
      // Not by the document's base, which may hold a user and a password: fetch refuses such an address.
      const url = new URL(`api/v1/${path}`, window.location.href);
      [url.username, url.password] = ["", ""];
      const response = await window.fetch(url, { cache: "no-store", credentials: "same-origin", signal: abort.signal });
      if (!response.ok) throw new Refused(response.status, Number(response.headers.get("Retry-After")) * 1000 || 0);
      return await response.json();
    } finally {
      window.clearTimeout(timer);
    }
  }

  // `ask(get)`: an async function, all requests of one round. `changed(connection)`: is called whenever the connection has changed.
  class Live {
    constructor(ask, changed) {
      this.ask = ask;
      this.changed = changed;
      this.timer = null;
      this.running = false;
      this.again = false;
      this.connection = { up: true, since: null, failures: 0, next: null, status: null };
      document.addEventListener("visibilitychange", () => this.now());
    }

    // A round at once, or right after the one that is under way.
    now() {
      this.again = this.running;
      if (!this.running) this._round();
    }

    // The very first answer: there is no need to wait for the rest of the round.
    answered() {
      if (this.connection.since === null) this._up();
    }

    async _round() {
      window.clearTimeout(this.timer);
      if (document.hidden) return;
      this.running = true;
      let pause = PERIOD;
      try {
        await this.ask(get);
        this._up();
      } catch (error) {
        pause = this._down(error);
      }
      this.running = false;
      if (this.again) {
        this.again = false;
        pause = 0;
      }
      this.timer = window.setTimeout(() => this._round(), pause);
    }

    _up() {
      const was = this.connection;
      this.connection = { up: true, since: Date.now(), failures: 0, next: null, status: null };
      this.changed(this.connection, was);
    }

    // For how long to wait: longer each time.
    _down(error) {
      const was = this.connection;
      const failures = was.failures + 1;
      const refused = error instanceof Refused ? error : null;
      if (!refused && !(error instanceof TypeError || error instanceof SyntaxError || error.name === "AbortError")) console.error(error);
      const pause = Math.min(LONGEST, Math.max(PERIOD * 2 ** (failures - 1), refused ? refused.after : 0));
      const since = was.up ? Date.now() : was.since;
      this.connection = { up: false, since, failures, next: Date.now() + pause, status: refused ? refused.status : null };
      this.changed(this.connection, was);
      return pause;
    }
  }

  page.live = { Live };
})(window.TorchGrad = window.TorchGrad || {});

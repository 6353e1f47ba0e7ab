// A request's stages as bars, from what the server kept of it.

const ms = (seconds) => (seconds === null || seconds === undefined ? "–" : `${(seconds * 1e3).toFixed(seconds < 0.1 ? 1 : 0)} ms`);

export class Timeline {
  #body;
  #scroll;
  #empty;

  constructor(root) {
    this.#body = root.getElementById("timeline");
    this.#scroll = root.getElementById("timeline-scroll");
    this.#empty = root.getElementById("timeline-empty");
    this.half = root.getElementById("axis-half");
    this.end = root.getElementById("axis-end");
  }

  clear() {
    this.#body.replaceChildren();
    this.#scroll.hidden = true;
    this.#empty.hidden = false;
  }

  show(timing) {
    const end = timing.finished_s ?? Math.max(...timing.stages.map((stage) => stage.last_s));
    const rows = timing.stages.map((stage, index) => this.#row(stage, (index % 3) + 1, end));
    const queue = { name: "queue", first_s: 0, last_s: timing.queue_s ?? end, marks: [] };
    const whole = { name: "whole request", first_s: 0, last_s: timing.finished_s, marks: [] };
    this.#body.replaceChildren(this.#row(queue, 0, end), ...rows, this.#row(whole, 0, end));
    this.half.textContent = ms(end / 2);
    this.end.textContent = ms(end);
    this.#scroll.hidden = false;
    this.#empty.hidden = true;
    // Only what scrolls needs to be reached by keyboard.
    if (this.#scroll.scrollWidth > this.#scroll.clientWidth) this.#scroll.tabIndex = 0;
    else this.#scroll.removeAttribute("tabindex");
  }

  #row(stage, colour, end) {
    const row = document.createElement("tr");
    row.className = `stage-${colour}`;
    const name = document.createElement("th");
    name.scope = "row";
    name.textContent = stage.name;
    const track = document.createElement("div");
    track.className = "track";
    const place = (kind, from, to) => {
      const part = document.createElement("span");
      part.className = kind;
      part.style.left = `${(100 * from) / end}%`;
      if (to !== undefined) part.style.width = `${(100 * (to - from)) / end}%`;
      track.append(part);
    };
    place("bar", stage.first_s, stage.last_s ?? end);
    for (const [at] of stage.marks) place("mark", at);
    const bars = document.createElement("td");
    bars.className = "bars";
    bars.append(track);
    row.append(name, bars);
    for (const value of [ms(stage.first_s), ms(stage.last_s), stage.outputs ?? "", stage.tokens || ""]) {
      const cell = document.createElement("td");
      cell.className = "number";
      cell.textContent = value;
      row.append(cell);
    }
    return row;
  }
}

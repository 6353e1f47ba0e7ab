// The waveform, drawn as it grows; what has been heard is brighter.

const BLOCK = 64; // samples whose least and greatest are kept
const QUIET = 4096; // what is quieter than this isn't drawn larger

export class Wave {
  #canvas;
  #low = [];
  #high = [];
  #count = 0;
  #open = null;
  #loudest = QUIET;

  constructor(canvas) {
    this.#canvas = canvas;
  }

  clear() {
    this.#low = [];
    this.#high = [];
    this.#count = 0;
    this.#open = null;
    this.#loudest = QUIET;
  }

  push(samples) {
    for (const sample of samples) {
      this.#open ??= [sample, sample];
      this.#open[0] = Math.min(this.#open[0], sample);
      this.#open[1] = Math.max(this.#open[1], sample);
      this.#count += 1;
      if (this.#count % BLOCK === 0) {
        this.#loudest = Math.max(this.#loudest, this.#open[1], -this.#open[0]);
        this.#low.push(this.#open[0]);
        this.#high.push(this.#open[1]);
        this.#open = null;
      }
    }
  }

  // `heard`: samples that have been played. `least`: samples that the width stands for at least, so that short beginnings don't stretch.
  draw(heard, least) {
    const canvas = this.#canvas;
    const scale = devicePixelRatio || 1;
    const width = Math.round(canvas.clientWidth * scale);
    const height = Math.round(canvas.clientHeight * scale);
    if (canvas.width !== width || canvas.height !== height) Object.assign(canvas, { width, height });
    const pen = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const [line, past, ahead] = ["--line", "--wave", "--wave-ahead"].map((name) => style.getPropertyValue(name));
    pen.clearRect(0, 0, width, height);
    pen.fillStyle = line;
    pen.fillRect(0, Math.floor(height / 2), width, Math.max(1, scale));
    const blocks = this.#low.length;
    if (!blocks) return;
    const span = Math.max(this.#count, least) / BLOCK;
    const bar = Math.max(2, Math.round(3 * scale));
    const gap = Math.max(1, Math.round(scale));
    for (let x = 0; x < width; x += bar + gap) {
      const from = Math.floor((x / width) * span);
      if (from >= blocks) break;
      const to = Math.max(from + 1, Math.min(blocks, Math.floor(((x + bar + gap) / width) * span)));
      const high = this.#high.slice(from, to).reduce((most, each) => Math.max(most, each), 0);
      const low = this.#low.slice(from, to).reduce((least, each) => Math.min(least, each), 0);
      const top = (height / 2) * (1 - (0.92 * high) / this.#loudest);
      const bottom = (height / 2) * (1 - (0.92 * low) / this.#loudest);
      pen.fillStyle = from * BLOCK < heard ? past : ahead;
      pen.beginPath();
      pen.roundRect(x, top, bar, Math.max(bar, bottom - top), bar / 2);
      pen.fill();
    }
  }
}

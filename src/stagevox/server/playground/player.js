// Plays samples as they come, without a break unless they come too late.

const LEAD = 0.03; // seconds between the first chunk's arrival and its sound
const CATCH_UP = 0.15; // the same after a break: one is better than several
const SLACK = 0.005;

export class Player {
  #context = null;
  #sources = new Set();
  #segments = []; // { at, first, count }: from when on the context's clock which samples are heard
  #end = 0;
  #count = 0;
  #rate = 0;
  breaks = 0;
  onEnded = () => {};

  // Called in a click or key press: browsers let nothing sound otherwise. Our rate, so that no chunk is resampled at its edges.
  open(rate) {
    this.stop();
    if (this.#context?.sampleRate !== rate) {
      this.#context?.close();
      this.#context = new AudioContext({ sampleRate: rate });
    }
    this.#context.resume();
    this.#segments = [];
    this.#rate = rate;
    this.#count = this.#end = this.breaks = 0;
  }

  push(samples) {
    if (!samples.length) return;
    const context = this.#context;
    const buffer = context.createBuffer(1, samples.length, this.#rate);
    buffer.copyToChannel(Float32Array.from(samples, (sample) => sample / 32768), 0);
    const source = new AudioBufferSourceNode(context, { buffer });
    source.connect(context.destination);
    const now = context.currentTime;
    if (!this.#count) this.#end = now + LEAD;
    else if (this.#end < now + SLACK) {
      this.breaks += 1;
      this.#end = now + CATCH_UP;
    }
    source.start(this.#end);
    this.#segments.push({ at: this.#end, first: this.#count, count: samples.length });
    this.#end += samples.length / this.#rate;
    this.#count += samples.length;
    this.#sources.add(source);
    source.onended = () => {
      this.#sources.delete(source);
      if (!this.#sources.size) this.onEnded();
    };
  }

  stop() {
    for (const source of this.#sources) {
      source.onended = null;
      source.stop();
    }
    this.#sources.clear();
  }

  get playing() {
    return this.#sources.size > 0;
  }

  // How many samples have been heard.
  get position() {
    const now = this.#context?.currentTime ?? 0;
    const past = this.#segments.findLast((segment) => segment.at <= now);
    return past ? past.first + Math.min(past.count, Math.floor((now - past.at) * this.#rate)) : 0;
  }
}

// The page: one request at a time, heard while it streams.

import { ApiFailure, chat, getJson, speech, wavFile } from "./api.js";
import { Player } from "./player.js";
import { Timeline } from "./timeline.js";
import { Wave } from "./wave.js";

const at = (id) => document.getElementById(id);
const player = new Player();
const wave = new Wave(at("wave"));
const timeline = new Timeline(document);
const FIRST_WIDTH = 2; // seconds that the waveform's width stands for at least while it grows

let about = { needs_key: false, sample_rate: 24000, reads_aloud: true, examples: [] };
let running = null; // the AbortController of the request in flight
let chunks = [];
let file = null;

const key = () => at("key").value.trim();
const seconds = (samples) => samples / about.sample_rate;
const say = (message) => { at("status").textContent = message; };
const enable = (id, on) => at(id).setAttribute("aria-disabled", String(!on));
const isOn = (id) => at(id).getAttribute("aria-disabled") !== "true";
const count = () => chunks.reduce((sum, chunk) => sum + chunk.length, 0);

function complain(error) {
  at("error").textContent = error instanceof ApiFailure ? error.message : `The answer broke off: ${error.message}`;
  at("text").setAttribute("aria-invalid", String(/^(text|input|messages)\b/.test(error.param ?? "")));
  if (error.status === 401) {
    at("key-row").hidden = false;
    at("key").focus();
  }
}

function forget() {
  player.stop();
  wave.clear();
  timeline.clear();
  chunks = [];
  if (file) URL.revokeObjectURL(file);
  file = null;
  at("download").removeAttribute("href");
  at("error").textContent = "";
  at("text").removeAttribute("aria-invalid");
  at("reply").hidden = true;
  at("reply").textContent = "";
  for (const id of ["ttfa", "length", "total", "rtf", "breaks"]) at(id).textContent = "–";
  for (const id of ["replay", "download"]) enable(id, false);
  at("wave").setAttribute("aria-label", "Waveform: empty");
  draw();
}

function draw() {
  wave.draw(player.position, running ? FIRST_WIDTH * about.sample_rate : 0);
  if (player.playing) at("breaks").textContent = String(player.breaks);
  if (running || player.playing) requestAnimationFrame(draw);
}

async function speak() {
  running?.abort();
  const mine = new AbortController();
  running = mine;
  const text = at("text").value;
  forget();
  if (!text.trim()) {
    running = null;
    complain(new ApiFailure(0, "Type something to say first.", "text"));
    say("Nothing said.");
    at("text").focus();
    return;
  }
  player.open(about.sample_rate);
  enable("stop", true);
  say("Waiting for the first sound…");
  const started = performance.now();
  draw();
  try {
    const mode = document.querySelector("input[name=mode]:checked").value;
    const end = await (mode === "chat" ? chat : speech)({
      text,
      voice: at("voice").value,
      rate: about.sample_rate,
      key: key(),
      signal: mine.signal,
      hear: (samples) => mine === running && hear(samples, started),
      read: (more) => {
        at("reply").hidden = false;
        at("reply").textContent += more;
      },
    });
    if (mine === running) await finish(end, started);
  } catch (error) {
    if (mine !== running) return;
    running = null;
    if (error.name === "AbortError") say(`Stopped after ${seconds(count()).toFixed(2)} s of speech.`);
    else {
      player.stop();
      complain(error);
      say(count() ? "The speech is not whole." : "Nothing was said.");
    }
  } finally {
    if (running === mine || !running) {
      running = null;
      enable("stop", player.playing);
      draw();
    }
  }
}

function hear(samples, started) {
  if (!samples.length) return;
  if (!chunks.length) {
    at("ttfa").textContent = `${(performance.now() - started).toFixed(0)} ms`;
    say("Speaking…");
  }
  chunks.push(samples);
  player.push(samples);
  wave.push(samples);
  at("length").textContent = `${seconds(count()).toFixed(2)} s`;
}

async function finish({ id, reason }, started) {
  const took = (performance.now() - started) / 1e3;
  const length = seconds(count());
  if (!length) throw new Error("it holds no sound");
  at("total").textContent = `${(took * 1e3).toFixed(0)} ms`;
  at("rtf").textContent = (took / length).toFixed(3);
  at("breaks").textContent = String(player.breaks);
  at("wave").setAttribute("aria-label", `Waveform: ${length.toFixed(2)} seconds of speech`);
  file = URL.createObjectURL(wavFile(chunks, about.sample_rate));
  Object.assign(at("download"), { href: file, download: "stagevox.wav" });
  for (const each of ["replay", "download"]) enable(each, true);
  const cut = reason === "length" ? " It was cut at a limit." : "";
  say(`${length.toFixed(2)} s of speech; the first sound came after ${at("ttfa").textContent}.${cut}`);
  running = null;
  const mine = chunks;
  try {
    const timing = id && (await getJson(`v1/timings/${id}`, key()));
    if (timing && chunks === mine) timeline.show(timing);
  } catch {
    // The speech is here; a server without such records is no failure.
  }
}

function stop() {
  running?.abort();
  player.stop();
  enable("stop", false);
}

function replay() {
  if (!isOn("replay")) return;
  player.open(about.sample_rate);
  for (const chunk of chunks) player.push(chunk);
  enable("stop", true);
  draw();
}

async function loadVoices() {
  try {
    const [voices, models] = await Promise.all([getJson("v1/audio/voices", key()), getJson("v1/models", key())]);
    at("voice").replaceChildren(
      ...voices.data.map((voice) => new Option(voice.default ? `${voice.id} (default)` : voice.id, voice.id, voice.default)),
    );
    at("voice-row").hidden = !voices.data.length;
    at("model").textContent = models.data[0].id;
    at("error").textContent = "";
  } catch (error) {
    at("voice-row").hidden = true;
    if (error.status === 401 && !key()) {
      at("key-row").hidden = false;
      at("model").textContent = "behind a key";
    } else complain(error);
  }
}

async function load() {
  draw();
  try {
    about = await getJson("playground/about");
  } catch (error) {
    complain(error);
    return;
  }
  at("key-row").hidden = !about.needs_key;
  at("mode-row").hidden = !about.reads_aloud;
  if (!about.reads_aloud) at("mode-chat").checked = true;
  at("examples").replaceChildren(
    ...about.examples.map((example) => {
      const chip = document.createElement("button");
      chip.type = "button";
      chip.textContent = example;
      chip.addEventListener("click", () => {
        at("text").value = example;
        at("text").focus();
      });
      return chip;
    }),
  );
  at("examples-row").hidden = !about.examples.length;
  if (!at("text").value && about.examples.length) at("text").value = about.examples[0];
  await loadVoices();
}

player.onEnded = () => {
  if (!running) enable("stop", false);
  draw();
};
at("form").addEventListener("submit", (event) => {
  event.preventDefault();
  speak();
});
at("stop").addEventListener("click", () => isOn("stop") && stop());
at("replay").addEventListener("click", replay);
at("download").addEventListener("click", (event) => isOn("download") || event.preventDefault());
at("key").addEventListener("change", loadVoices);
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    speak();
  }
  if (event.key === "Escape" && isOn("stop")) stop();
});
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
load();

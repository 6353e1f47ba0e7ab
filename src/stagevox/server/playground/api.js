// The server's interfaces, read as they stream: samples are Int16Array, mono.

export class ApiFailure extends Error {
  constructor(status, message, param) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

export async function getJson(path, key) {
  const answer = await fetch(path, { headers: headers(key), cache: "no-store" });
  if (!answer.ok) throw await failure(answer);
  return answer.json();
}

async function failure(answer) {
  let message = `the server answered ${answer.status}`;
  let param = null;
  try {
    const { error } = await answer.json();
    message = error.message;
    param = error.param ?? null;
  } catch {
    // not our server's error, such as a proxy's: the status has to do
  }
  const wait = answer.headers.get("retry-after");
  if (answer.status === 429 && wait) message += ` (try again in ${wait} s)`;
  return new ApiFailure(answer.status, message, param);
}

async function post(path, body, key, signal) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", ...headers(key) },
    body: JSON.stringify(body),
    signal,
  });
  if (!answer.ok) throw await failure(answer);
  return answer;
}

// Bytes as whole samples: the network cuts where it likes.
class Samples {
  #odd = new Uint8Array(0);

  take(bytes) {
    const all = new Uint8Array(this.#odd.length + bytes.length);
    all.set(this.#odd);
    all.set(bytes, this.#odd.length);
    const count = all.length >> 1;
    this.#odd = all.slice(count * 2);
    const view = new DataView(all.buffer);
    return Int16Array.from({ length: count }, (_, index) => view.getInt16(index * 2, true));
  }

  end() {
    if (this.#odd.length) throw new Error("the sound ended in the middle of a sample");
  }
}

// Both: `hear(samples)` and `read(text)` are called as things come; resolves to { id, reason }.
export async function speech({ text, voice, rate, key, signal, hear }) {
  const body = { input: text, response_format: "pcm", sample_rate: rate };
  if (voice) body.voice = voice;
  const answer = await post("v1/audio/speech", body, key, signal);
  const samples = new Samples();
  const reader = answer.body.getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) hear(samples.take(part.value));
  samples.end();
  return { id: answer.headers.get("x-request-id"), reason: null };
}

export async function chat({ text, voice, rate, key, signal, hear, read }) {
  const audio = { format: "pcm16", sample_rate: rate };
  if (voice) audio.voice = voice;
  const body = { messages: [{ role: "user", content: text }], modalities: ["text", "audio"], audio, stream: true };
  const answer = await post("v1/chat/completions", body, key, signal);
  const samples = new Samples();
  let reason = null;
  let done = false;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") {
      done = true;
      continue;
    }
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiFailure(answer.status, chunk.error.message, chunk.error.param);
    for (const choice of chunk.choices) {
      if (choice.delta.content) read(choice.delta.content);
      if (choice.delta.audio?.data) hear(samples.take(Uint8Array.from(atob(choice.delta.audio.data), (c) => c.charCodeAt(0))));
      reason = choice.finish_reason ?? reason;
    }
  }
  samples.end();
  if (!done || !reason) throw new Error("the stream broke off");
  return { id: answer.headers.get("x-request-id"), reason };
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let part = await reader.read(); !part.done; part = await reader.read()) {
    const whole = (rest + part.value).split("\n\n");
    rest = whole.pop();
    for (const event of whole) if (event.startsWith("data: ")) yield event.slice(6);
  }
}

export function wavFile(chunks, rate) {
  const count = chunks.reduce((sum, chunk) => sum + chunk.length, 0);
  const bytes = new DataView(new ArrayBuffer(44 + count * 2));
  const tag = (at, name) => [...name].forEach((letter, index) => bytes.setUint8(at + index, letter.charCodeAt(0)));
  tag(0, "RIFF");
  bytes.setUint32(4, 36 + count * 2, true);
  tag(8, "WAVEfmt ");
  bytes.setUint32(16, 16, true);
  bytes.setUint16(20, 1, true);
  bytes.setUint16(22, 1, true);
  bytes.setUint32(24, rate, true);
  bytes.setUint32(28, rate * 2, true);
  bytes.setUint16(32, 2, true);
  bytes.setUint16(34, 16, true);
  tag(36, "data");
  bytes.setUint32(40, count * 2, true);
  let at = 44;
  for (const chunk of chunks) for (const sample of chunk) bytes.setInt16((at += 2) - 2, sample, true);
  return new Blob([bytes.buffer], { type: "audio/wav" });
}

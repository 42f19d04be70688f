// Talks to the server that the page came from: requests with the key, errors in words, streams of events.

/** What the server refused, with its own message and its status. */
export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let key = sessionStorage.getItem("key") || "";

export function getKey() {
  return key;
}

export function setKey(value) {
  key = value.trim();
  if (key) sessionStorage.setItem("key", key);
  else sessionStorage.removeItem("key");
}

/** fetch with the key; paths are relative, so that the page works below a prefix, too. Throws ServerError. */
export async function request(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (response.ok) return response;
  const text = await response.text();
  let message = text.slice(0, 300) || response.statusText;
  try {
    const body = JSON.parse(text);
    message = body.error?.message || body.detail || message;
  } catch {
    // not JSON: the text itself is the message
  }
  if (response.status === 401) message = `${message} Enter the API key under Settings.`;
  throw new ServerError(response.status, typeof message === "string" ? message : JSON.stringify(message));
}

/** The data of each server-sent event of a response, however the network cuts it. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      rest += done ? "\n\n" : value;
      const held = rest.endsWith("\r") && !done ? "\r" : "";
      const lines = rest.slice(0, rest.length - held.length).split(/\r\n|\r|\n/);
      rest = lines.pop() + held;
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

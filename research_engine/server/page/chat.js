// The conversation: sends it, shows the answer as it comes, stops it. A model's text is only ever text, never markup.

import { events, request, ServerError } from "./connection.js";

const $ = (id) => document.getElementById(id);

export class Chat {
  /** settings: () => {model, system, parameters} at the time of a question. */
  constructor(settings) {
    this.settings = settings;
    this.messages = [];
    this.abort = null;
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send($("message").value);
    });
    $("message").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send($("message").value);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    $("stop").addEventListener("click", () => this.stop());
    $("new").addEventListener("click", () => this.reset());
    $("retry").addEventListener("click", () => this.retry());
  }

  reset() {
    this.stop();
    this.messages = [];
    for (const element of [...$("log").querySelectorAll(".message")]) element.remove();
    $("empty").hidden = false;
    $("retry").disabled = true;
    $("message").focus();
  }

  stop() {
    this.abort?.abort();
  }

  retry() {
    if (this.abort) return;
    const last = this.messages.findLastIndex((message) => message.role === "user");
    if (last < 0) return;
    const question = this.messages[last].content;
    this.messages.length = last;
    const shown = [...$("log").querySelectorAll(".message")];
    const from = shown.findLastIndex((element) => element.classList.contains("user"));
    shown.slice(from).forEach((element) => element.remove());
    this.send(question);
  }

  async send(question) {
    if (!question.trim() || this.abort) return;
    $("message").value = "";
    $("empty").hidden = true;
    this.messages.push({ role: "user", content: question });
    setText(addMessage("user", "you"), question);
    const answer = addMessage("assistant", this.settings().model || "model");
    answer.classList.add("waiting");
    this.abort = new AbortController();
    const { signal } = this.abort;
    this.busy(true);
    const got = { text: "", tokens: 0, began: performance.now(), first: null, usage: null, reason: "" };
    try {
      await this.stream(answer, got, signal);
    } catch (error) {
      if (!signal.aborted) showError(error);
    }
    answer.classList.remove("waiting");
    render(answer, got);
    setFacts(answer, got, signal.aborted);
    if (got.text) this.messages.push({ role: "assistant", content: got.text });
    else if (!signal.aborted) answer.remove();
    this.abort = null;
    this.busy(false);
  }

  async stream(answer, got, signal) {
    const { model, system, parameters } = this.settings();
    const messages = system ? [{ role: "system", content: system }, ...this.messages] : this.messages;
    const body = { model, messages, stream: true, stream_options: { include_usage: true }, ...parameters };
    const response = await request("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(body),
      signal,
    });
    let drawn = false;
    for await (const data of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(200, chunk.error.message || String(chunk.error));
      got.usage = chunk.usage || got.usage;
      const choice = chunk.choices?.[0];
      got.reason = choice?.finish_reason || got.reason;
      const text = choice?.delta?.content;
      if (!text) continue;
      got.first ??= performance.now();
      got.text += text;
      got.tokens += 1;
      if (drawn) continue; // once a frame is often enough
      drawn = true;
      requestAnimationFrame(() => {
        drawn = false;
        if (answer.classList.contains("waiting")) render(answer, got);
      });
    }
    if (!got.reason) throw new ServerError(200, "The server ended the answer without saying why.");
  }

  busy(is) {
    $("send").hidden = is;
    $("stop").hidden = !is;
    $("retry").disabled = is || !this.messages.length;
    if (!is) $("message").focus();
  }
}

function addMessage(kind, who) {
  const element = document.createElement("article");
  element.className = `message ${kind}`;
  for (const [name, text] of [["who", who], ["text", ""]]) {
    const part = document.createElement("div");
    part.className = name;
    part.textContent = text;
    element.append(part);
  }
  keepDown(() => $("log").append(element));
  return element;
}

function setText(element, text) {
  element.querySelector(".text").textContent = text;
}

/** Text with its fenced code set apart; every piece goes in as text. */
function render(element, got) {
  const parts = got.text.split(/^```[^\n`]*\n?/m);
  const nodes = parts.map((part, index) => {
    const beforeCode = index + 1 < parts.length;
    if (index % 2 === 0) return document.createTextNode(beforeCode ? part.replace(/\n+$/, "") : part.replace(/^\n+/, ""));
    const block = document.createElement("pre");
    block.textContent = part.replace(/\n$/, "");
    return block;
  });
  keepDown(() => element.querySelector(".text").replaceChildren(...nodes));
}

function setFacts(element, got, stopped) {
  const tokens = got.usage?.completion_tokens ?? got.tokens;
  const facts = [];
  if (got.first !== null) {
    const seconds = (performance.now() - got.first) / 1000;
    facts.push(`${tokens} tokens`, `first after ${((got.first - got.began) / 1000).toFixed(2)} s`);
    if (tokens > 1 && seconds > 0.05) facts.push(`${((tokens - 1) / seconds).toFixed(1)} tok/s`);
  }
  if (got.reason === "length") facts.push("cut off at its limit of tokens");
  if (stopped) facts.push("stopped");
  const line = document.createElement("div");
  line.className = "facts";
  line.textContent = facts.join(" · ");
  keepDown(() => element.append(line));
}

function showError(error) {
  const element = addMessage("error", "error");
  element.setAttribute("role", "alert");
  setText(element, error instanceof ServerError ? error.message : `The server cannot be reached (${error.message}).`);
}

/** Changes the log, and keeps its end in view for whoever was looking at it. */
function keepDown(change) {
  const log = $("log");
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

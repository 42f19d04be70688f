// Draws the batch timeline: a bar for each engine step, as wide as it took, as high as its tokens, prefill on decode.

const LEFT = 38;
const BOTTOM = 18;
const TOP = 8;
const KEPT = 4096;

export class Timeline {
  constructor(canvas, onPick) {
    this.canvas = canvas;
    this.onPick = onPick;
    this.steps = [];
    this.span = 10;
    this.now = 0; // engine seconds at the right edge
    this.picked = null;
    canvas.addEventListener("pointermove", (event) => this.pickAt(event.offsetX));
    canvas.addEventListener("pointerdown", (event) => this.pickAt(event.offsetX));
    canvas.addEventListener("pointerleave", () => this.pick(null));
    canvas.addEventListener("keydown", (event) => this.pickByKey(event));
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  add(steps) {
    this.steps.push(...steps);
    if (this.steps.length > KEPT) this.steps.splice(0, this.steps.length - KEPT);
  }

  clear() {
    this.steps = [];
    this.picked = null;
  }

  visible() {
    return this.steps.filter((step) => step.finished >= this.now - this.span);
  }

  pickAt(x) {
    const { width } = this.canvas.getBoundingClientRect();
    const at = this.now - this.span + ((x - LEFT) / (width - LEFT)) * this.span;
    let best = null;
    let distance = (6 / (width - LEFT)) * this.span; // six pixels beside a thin bar still mean it
    for (const step of this.visible()) {
      const away = Math.max(step.started - at, at - step.finished, 0);
      if (away <= distance) [best, distance] = [step, away];
    }
    this.pick(best);
  }

  pickByKey(event) {
    const steps = this.visible();
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !steps.length) return;
    event.preventDefault();
    const at = steps.indexOf(this.picked);
    this.pick(steps[at < 0 ? steps.length - 1 : Math.min(steps.length - 1, Math.max(0, at + move))]);
  }

  pick(step) {
    this.picked = step;
    this.onPick(step);
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const { width, height } = canvas.getBoundingClientRect();
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
    }
    const paint = canvas.getContext("2d");
    const style = getComputedStyle(canvas);
    const color = (name) => style.getPropertyValue(name).trim();
    paint.setTransform(scale, 0, 0, scale, 0, 0);
    paint.clearRect(0, 0, width, height);
    const steps = this.visible();
    const most = niceAbove(Math.max(1, ...steps.map((step) => step.num_tokens)));
    const area = { width: width - LEFT, height: height - BOTTOM - TOP };
    const x = (time) => LEFT + ((time - this.now + this.span) / this.span) * area.width;
    const y = (tokens) => TOP + area.height * (1 - tokens / most);

    paint.font = "11px system-ui, sans-serif";
    paint.textBaseline = "middle";
    paint.fillStyle = color("--soft");
    paint.strokeStyle = color("--line");
    paint.lineWidth = 1;
    for (const tokens of [0, most / 2, most]) {
      const at = Math.round(y(tokens)) + 0.5;
      paint.beginPath();
      paint.moveTo(LEFT, at);
      paint.lineTo(width, at);
      paint.stroke();
      paint.textAlign = "right";
      paint.fillText(short(tokens), LEFT - 5, at);
    }
    for (const [share, align] of [[0, "left"], [0.5, "center"], [1, "right"]]) {
      paint.textAlign = align;
      const ago = this.span * (1 - share);
      paint.fillText(ago ? `${ago} s ago` : "now", LEFT + share * area.width - (share === 1 ? 3 : 0), height - 8);
    }

    paint.save();
    paint.beginPath();
    paint.rect(LEFT, 0, area.width, height - BOTTOM + 1);
    paint.clip();
    for (const step of steps) {
      const left = x(step.started);
      const wide = Math.max(1, x(step.finished) - left - 0.5);
      paint.globalAlpha = this.picked && this.picked !== step ? 0.45 : 1;
      paint.fillStyle = color("--decode");
      paint.fillRect(left, y(step.num_decode_tokens), wide, y(0) - y(step.num_decode_tokens));
      paint.fillStyle = color("--prefill");
      paint.fillRect(left, y(step.num_tokens), wide, y(step.num_decode_tokens) - y(step.num_tokens));
    }
    paint.restore();
    if (!steps.length) {
      paint.fillStyle = color("--soft");
      paint.textAlign = "center";
      paint.fillText("idle", LEFT + area.width / 2, TOP + area.height / 2);
    }
    const rate = steps.length ? `${steps.length} steps, at most ${most} tokens a step` : "no step";
    canvas.setAttribute("aria-label", `Tokens of each step over the last ${this.span} seconds: ${rate}`);
  }
}

/** The least round number that is not below the value and halves well, for the axis. */
function niceAbove(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.2, 1.6, 2, 2.4, 3, 4, 5, 6, 8, 10].map((digit) => digit * power).find((nice) => nice >= value);
}

function short(value) {
  return value >= 1000 ? `${value / 1000}k` : String(value);
}

// What all pictures are made of: elements, numbers, colours, axes, the tip. Text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";
const darkness = window.matchMedia("(prefers-color-scheme: dark)");
const narrow = window.matchMedia("(max-width: 900px)");

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null));
  return made;
}

function shape(name, attributes = {}, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function drawing(width, height, label) {
  return shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
}

// Numbers, as the terminal has them.
const known = (value) => value !== null && value !== undefined;
const exponential = (value, digits) => value.toExponential(digits).replace("e+", "e");
const tiny = (value) => (!known(value) ? "–" : value === 0 ? "0" : exponential(value, 1));
const times = (value) =>
  !known(value) ? "–" : value < 0.05 ? (value === 0 ? "0" : "<0.1×") : value < 99.95 ? `${value.toFixed(1)}×` : value < 1e4 ? `${value.toFixed(0)}×` : `${exponential(value, 0)}×`;
function number(value) {
  if (!known(value)) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  return size >= 1e5 || size < 1e-3 ? exponential(value, 1) : String(Number(value.toPrecision(3)));
}
const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Colours: from light to dark, or from dark to light on dark, so that lightness alone tells them apart.
const RAMPS = {
  light: ["#eef2f5", "#d3e0ea", "#aac6dd", "#8aa5cf", "#8b80bd", "#8a54a0", "#7c2378", "#4d0a4b"],
  dark: ["#1d2833", "#28405a", "#3d5d8c", "#6473b3", "#9484cc", "#c798d8", "#efb6dc", "#fff0f5"],
};
const SPLITS = {
  light: ["#7a3a02", "#c9762b", "#f0c795", "#eef1f4", "#a9c9e4", "#3f83bd", "#0b3f73"],
  dark: ["#ffd9a8", "#e09a50", "#7d5426", "#222d38", "#2f567a", "#63a5dc", "#cfe6fb"],
};

function mixed(stops, at) {
  const place = Math.min(Math.max(at, 0), 1) * (stops.length - 1);
  const first = Math.min(Math.floor(place), stops.length - 2);
  const [a, b] = [stops[first], stops[first + 1]].map((hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16)));
  return a.map((low, i) => Math.round(low + (b[i] - low) * (place - first)));
}
const stops = (kind) => (kind === "split" ? SPLITS : RAMPS)[darkness.matches ? "dark" : "light"];
const colour = (kind, at) => `rgb(${mixed(stops(kind), at).join(",")})`;
const inkOn = (kind, at) => {
  const [r, g, b] = mixed(stops(kind), at);
  return 0.3 * r + 0.59 * g + 0.11 * b > 140 ? "#10161d" : "#ffffff";
};

function ramp(kind, width = 120) {
  const canvas = element("canvas", { width, height: 12, role: "presentation" });
  const context = canvas.getContext("2d");
  for (let x = 0; x < width; x++) {
    context.fillStyle = colour(kind, x / (width - 1));
    context.fillRect(x, 0, 1, 12);
  }
  return canvas;
}

// A map of levels: a byte a cell, 0 for no error, else the logarithm of the error.
function bytesOf(text) {
  return Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
}
const errorAt = (level, scale) => (level === 0 ? 0 : 10 ** (scale[0] + ((level - 1) / 254) * (scale[1] - scale[0])));
const HEAT = [-9, 0.5]; // powers of ten between which errors of values are coloured
const heat = (level, scale) => (level === 0 ? 0 : (Math.log10(errorAt(level, scale)) - HEAT[0]) / (HEAT[1] - HEAT[0]));

function paint(canvas, grid, scale) {
  const levels = bytesOf(grid.levels);
  canvas.width = grid.columns;
  canvas.height = grid.rows;
  const context = canvas.getContext("2d");
  const picture = context.createImageData(grid.columns, grid.rows);
  const palette = Array.from({ length: 256 }, (_, level) => mixed(stops("ramp"), heat(level, scale)));
  levels.forEach((level, i) => picture.data.set([...palette[level], 255], 4 * i));
  context.putImageData(picture, 0, 0);
  return levels;
}

// The tip: what is under the pointer, or the cursor.
const tip = document.getElementById("tip");
function showTip(event, title, lines) {
  tip.replaceChildren(element("b", {}, title), lines.filter((line) => line).join("\n"));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const x = event.clientX ?? event.left;
  const y = event.clientY ?? event.top;
  tip.style.left = `${Math.max(6, Math.min(x + 14, window.innerWidth - box.width - 8))}px`;
  tip.style.top = `${y + 18 + box.height > window.innerHeight ? Math.max(6, y - box.height - 12) : y + 18}px`;
}
function hideTip() {
  tip.hidden = true;
}

// Where a bar is, of so many pixels for each: with a gap, where there is room for one.
const slot = (left, each, at) => (each < 4 ? { x: left + at * each, width: each + 0.3 } : { x: left + at * each + 0.5, width: each - 1 });

// A scale from values to pixels, and marks on it.
function logarithmic(low, high, from, to) {
  const [a, b] = [Math.log10(low), Math.log10(high)];
  const place = (value) => from + ((Math.log10(Math.min(Math.max(value, low), high)) - a) / (b - a || 1)) * (to - from);
  const step = Math.max(1, Math.ceil((b - a) / 5));
  const ticks = [];
  for (let power = Math.ceil(a); power <= b + 1e-9; power += step) ticks.push([10 ** power, `1e${power}`]);
  return { place, ticks };
}
function linear(low, high, from, to) {
  const span = high - low || 1;
  const rough = span / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
  const ticks = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) ticks.push([value, number(Math.abs(value) < step / 1e3 ? 0 : value)]);
  return { place: (value) => from + ((value - low) / span) * (to - from), ticks };
}
function axis(svg, scale, left, right) {
  for (const [value, text] of scale.ticks) {
    const y = scale.place(value);
    svg.append(shape("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }), shape("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, text));
  }
}
// Every n-th of so many numbers has a label, for which there is room.
const every = (count, width, room = 26) => [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000].find((n) => (width / count) * n >= room) ?? 2000;

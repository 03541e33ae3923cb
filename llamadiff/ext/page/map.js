// The map: layers down, taps across in graph order. By pointer, or by keyboard: arrows move, Enter opens.

const MATCH = 0, NOISE = 1, UNCHECKED = 2, WRONG = 3;
const GLYPH = ["", "~", "?", "✗"];

// What a cell's colour may say. at: 0 to 1 along the colours, null where there is nothing to say.
const powers = (low, high) => (value) => (!known(value) ? null : value <= 0 ? 0 : (Math.log10(value) - low) / (high - low));
const METRICS = [
  { key: "own", name: "own error", title: "Each op, judged on its own inputs", says: "Colour is the op's own error (NMSE). It alone decides.", at: powers(-16, 0), ends: ["1e-16", "1"], value: (c) => c.own },
  { key: "drift", name: "drift", title: "What came through from before", says: "How far each tap is from the baseline's (NMSE): it accumulates, and decides nothing.", at: powers(-16, 0), ends: ["1e-16", "1"], value: (c) => c.drift },
  { key: "rounding", name: "× rounding", title: "Drift, in units of rounding", says: "Drift over what rounding alone explains: 1 is rounding.", at: powers(-1, 7), ends: ["0.1×", "1e7×"], value: (c) => c.rounding },
  { key: "cosine", name: "cosine", title: "Direction", says: "1 − cosine between both sides.", at: powers(-12, 0), ends: ["1e-12", "1"], value: (c) => (known(c.cosine) ? Math.max(0, 1 - c.cosine) : null) },
  { key: "rms", name: "RMS ratio", title: "Size", says: "The candidate's RMS over the baseline's. RoPE, permutations and signs do not show in it.", kind: "split", at: (v) => (!known(v) || v <= 0 ? null : 0.5 + Math.log2(v) / 4), ends: ["¼", "4"], value: (c) => c.rms_ratio },
  { key: "mean", name: "mean drift", title: "Mean", says: "How far the means are apart, over the baseline's RMS.", kind: "split", at: (v) => (known(v) ? 0.5 + 0.5 * Math.sign(v) * Math.max(0, 1 + Math.log10(Math.abs(v) || 1e-12) / 6) : null), ends: ["−1", "+1"], value: (c) => (known(c.mean_drift) && c.b_rms > 0 ? c.mean_drift / c.b_rms : null) },
];

function cellLines(cell, report) {
  const moment = (name) => known(cell[`b_${name}`]) && known(cell[`c_${name}`]) && `${name} ${number(cell[`b_${name}`])} → ${number(cell[`c_${name}`])}`;
  return [
    `${report.verdicts[cell.verdict].toUpperCase()} · ${cell.op}${cell.weight ? ` by ${cell.weight}` : ""}`,
    known(cell.own) && `own error ${tiny(cell.own)}, limit ${tiny(cell.limit)}${cell.times ? ` (${times(cell.times)})` : ""}`,
    known(cell.drift) && `drift ${tiny(cell.drift)}${known(cell.rounding) ? `, ${times(cell.rounding)} rounding` : ""}`,
    known(cell.cosine) && `cosine ${cell.cosine.toFixed(6)}`,
    moment("rms"),
    moment("mean"),
    cell.span && `answers for ${cell.span} too`,
    cell.why,
  ];
}

class TapMap {
  constructor(report, place, open) {
    Object.assign(this, { report, place, open, metric: METRICS[0], cursor: null });
    this.layers = [...new Set(report.cells.filter((cell) => cell.column >= 0).map((cell) => cell.layer))].sort((a, b) => a - b);
    this.grid = new Map(report.cells.filter((cell) => cell.column >= 0).map((cell) => [`${this.layers.indexOf(cell.layer)} ${cell.column}`, cell]));
    this.outside = report.cells.filter((cell) => cell.column < 0);
    this.used = METRICS.filter((metric) => report.cells.some((cell) => known(metric.value(cell))));
    if (!this.used.includes(this.metric)) this.metric = this.used[0] ?? METRICS[0];
  }

  switches(place) {
    place.setAttribute("role", "group");
    place.setAttribute("aria-label", "What colours say");
    const buttons = this.used.map((metric) => {
      const button = element("button", { type: "button", "aria-pressed": metric === this.metric, "data-metric": metric.key }, metric.name);
      button.addEventListener("click", () => {
        this.metric = metric;
        for (const other of buttons) other.setAttribute("aria-pressed", other === button);
        this.draw();
      });
      return button;
    });
    place.replaceChildren(...buttons);
    place.hidden = buttons.length < 2;
  }

  // Sizes by the room there is: cells grow with it, and never become too small to be told apart.
  sizes() {
    const columns = Math.max(1, this.report.columns.length);
    const room = Math.max(260, this.place.clientWidth);
    this.left = 34;
    this.slant = (room - this.left) / columns > 22 ? 52 : 90;
    this.right = this.slant === 90 ? 8 : 58;
    this.across = Math.min(44, Math.max(11, Math.floor((room - this.left - this.right) / columns)));
    this.down = this.layers.length > 60 ? 8 : this.layers.length > 36 ? 12 : this.layers.length > 12 ? 17 : 22;
    const longest = Math.max(4, ...this.report.columns.map((label) => Math.min(22, label.length)));
    this.place.classList.toggle("deep", this.layers.length > 36);
    this.top = Math.round(longest * 5.9 * Math.sin((this.slant * Math.PI) / 180)) + 12;
    this.before = this.outside.filter((cell) => this.report.cells.indexOf(cell) < this.report.cells.findIndex((other) => other.column >= 0));
    this.after = this.outside.filter((cell) => !this.before.includes(cell));
    this.start = this.before.length ? 26 : 2;
    this.width = Math.max(this.left + columns * this.across + this.right, ...[this.before, this.after].map((cells) => this.extent(cells)));
    this.height = this.start + this.layers.length * this.down + (this.after.length ? 30 : 4);
  }

  extent(cells) {
    return this.left + cells.reduce((sum, cell) => sum + 38 + cut(cell.tap, 24).length * 6.4, 0);
  }

  draw() {
    this.sizes();
    this.heads = drawing(this.width, this.top, "Taps of a layer, in the order in which they are computed");
    this.heads.setAttribute("class", "labels");
    const svg = drawing(this.width, this.height, `Map of ${this.report.cells.length} taps in ${this.layers.length} layers. Arrows move, Enter opens a tap.`);
    svg.setAttribute("role", "application");
    svg.setAttribute("tabindex", "0");
    this.svg = svg;
    this.spots = [];
    this.labels();
    for (const [key, cell] of this.grid) {
      const [row, column] = key.split(" ").map(Number);
      this.cell(cell, this.left + column * this.across, this.start + row * this.down, this.across - 1.5, this.down - 1.5);
    }
    this.chips(this.before, 2);
    this.chips(this.after, this.height - 22);
    this.ring = shape("rect", { class: "cursor", rx: 3, visibility: "hidden" });
    svg.append(this.ring);
    svg.addEventListener("keydown", (event) => this.key(event));
    svg.addEventListener("blur", () => hideTip());
    svg.addEventListener("focus", () => this.cursor || this.move(this.first()));
    this.place.replaceChildren(this.heads, svg);
    if (this.cursor) this.mark(this.cursor);
    this.explain();
  }

  labels() {
    this.report.columns.forEach((label, column) => {
      const x = this.left + (column + 0.5) * this.across;
      const text = shape("text", { x, y: this.top - 4, transform: `rotate(${-this.slant} ${x + 3} ${this.top - 4})`, dx: 3, dy: this.slant === 90 ? 3 : 0 }, cut(label, 22));
      this.heads.append(text);
    });
    const step = every(this.layers.length, this.layers.length * this.down, 14);
    this.layers.forEach((layer, row) => {
      if (row % step === 0 || row === this.layers.length - 1 && row % step > step / 2) this.svg.append(shape("text", { x: this.left - 7, y: this.start + (row + 0.5) * this.down + 3.5, "text-anchor": "end" }, layer));
    });
  }

  chips(cells, y) {
    let x = this.left;
    for (const cell of cells) {
      const label = cut(cell.tap, 24);
      this.cell(cell, x, y, 20, 15);
      this.svg.append(shape("text", { x: x + 25, y: y + 11.5 }, label));
      x += 38 + label.length * 6.4;
    }
  }

  cell(cell, x, y, width, height) {
    const at = this.metric.at(this.metric.value(cell));
    const fill = at === null ? "var(--none)" : colour(this.metric.kind ?? "ramp", at);
    const rect = shape("rect", { class: "hit", "data-tap": cell.tap, x, y, width, height, rx: 2.5 });
    rect.style.fill = fill;
    const spot = { cell, x, y, width, height };
    this.spots.push(spot);
    rect.addEventListener("pointermove", (event) => showTip(event, cell.tap, cellLines(cell, this.report)));
    rect.addEventListener("pointerleave", hideTip);
    rect.addEventListener("click", () => {
      this.cursor = spot;
      this.mark(spot);
      this.open(cell, true);
    });
    this.svg.append(rect);
    if (cell.verdict === WRONG) {
      const ring = shape("rect", { x, y, width, height, rx: 2.5, "pointer-events": "none" });
      ring.style.fill = "none";
      ring.style.stroke = "var(--wrong)";
      ring.style.strokeWidth = "2.5";
      this.svg.append(ring);
    }
    if (cell.verdict !== MATCH && height >= 6) {
      const glyph = shape("text", { class: "glyph", x: x + width / 2, y: y + height / 2 + 0.5 }, GLYPH[cell.verdict]);
      glyph.style.fontSize = `${Math.min(13, height - 1)}px`;
      if (at !== null) glyph.style.fill = inkOn(this.metric.kind ?? "ramp", at);
      this.svg.append(glyph);
    }
  }

  explain() {
    const key = this.place.parentElement.querySelector("[data-place=map-key]");
    const kind = this.metric.kind ?? "ramp";
    const note = (mark, name, text) => element("span", {}, element("i", { class: `swatch ${name}` }, mark), text);
    const marks = [[WRONG, "wrong"], [NOISE, ""], [UNCHECKED, ""]].filter(([verdict]) => this.report.cells.some((cell) => cell.verdict === verdict));
    key.replaceChildren(
      element("span", {}, this.metric.ends[0], ramp(kind), this.metric.ends[1]),
      ...marks.map(([verdict, name]) => note(GLYPH[verdict], name, this.report.verdicts[verdict].toUpperCase())),
    );
    const wrong = this.report.cells.filter((cell) => cell.verdict === WRONG).length;
    const card = this.place.closest(".card");
    card.querySelector("[data-text=map-title]").textContent = this.metric.title;
    const judged = `${this.report.cells.length} ${this.report.cells.length === 1 ? "tap" : "taps"} in ${this.layers.length} ${this.layers.length === 1 ? "layer" : "layers"}`;
    const open = this.report.cells.filter((cell) => cell.verdict === UNCHECKED).length;
    const right = wrong === 0 ? (open ? "" : "none is wrong") : wrong === 1 ? "one is wrong" : `${wrong} are wrong`;
    const found = [right, open && `${open} could not be judged`].filter(Boolean).join(", ");
    card.querySelector("[data-text=map-says]").textContent = `${judged}: ${found}. ${this.metric.says} Click a cell to open it.`;
  }

  first() {
    return this.spots.find((spot) => spot.cell === this.report.leading) ?? this.spots[0];
  }

  spotOf(cell) {
    return this.spots.find((spot) => spot.cell === cell);
  }

  mark(spot) {
    const drawn = this.spotOf(spot.cell) ?? spot;
    for (const name of ["x", "y"]) this.ring.setAttribute(name, drawn[name] - 2.5);
    for (const name of ["width", "height"]) this.ring.setAttribute(name, drawn[name] + 5);
    this.ring.setAttribute("visibility", "visible");
  }

  // Scroll the map, not the page, until a cell is in sight.
  reveal(spot) {
    const { place, top } = this;
    if (spot.y + top < place.scrollTop + top || spot.y + spot.height + top > place.scrollTop + place.clientHeight) place.scrollTop = spot.y + top - place.clientHeight / 2;
    if (spot.x < place.scrollLeft || spot.x + spot.width > place.scrollLeft + place.clientWidth) place.scrollLeft = spot.x - place.clientWidth / 2;
  }

  move(spot) {
    if (!spot) return;
    this.cursor = spot;
    this.mark(spot);
    this.reveal(spot);
    const box = this.svg.getBoundingClientRect();
    showTip({ clientX: box.left + spot.x + spot.width, clientY: box.top + spot.y + spot.height }, spot.cell.tap, cellLines(spot.cell, this.report));
  }

  // The nearest cell in a direction: straight on if there is one.
  key(event) {
    const steps = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Escape") hideTip();
    if ((event.key === "Enter" || event.key === " ") && this.cursor) {
      event.preventDefault();
      this.open(this.cursor.cell, true);
    }
    if (!steps) return;
    event.preventDefault();
    const [dx, dy] = steps;
    const now = this.spotOf((this.cursor ?? this.first()).cell);
    const far = (spot) => {
      const along = (spot.x - now.x) * dx + (spot.y - now.y) * dy;
      const aside = Math.abs((spot.x - now.x) * dy) + Math.abs((spot.y - now.y) * dx);
      return along > 1 ? along + 4 * aside : Infinity;
    };
    const best = this.spots.reduce((found, spot) => (far(spot) < far(found) ? spot : found), now);
    if (best !== now) this.move(best);
  }
}

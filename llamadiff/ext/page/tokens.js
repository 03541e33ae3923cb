// Along the tokens: KL and agreement after each, the worst op at each; and the slots of the cache.

function timeline(report, place) {
  const found = report.logits;
  const positions = found ? found.positions : [];
  const steps = report.steps.filter((step) => step);
  if (positions.length < 2 && steps.length < 2) return;
  place.hidden = false;
  const count = report.tokens.length;
  const decoded = count - report.prefill > 0 && report.prefill > 0 ? count - report.prefill : 0;
  const says = decoded ? `The first ${report.prefill} tokens are one prefill; then ${decoded} decode ${decoded === 1 ? "step" : "steps"}, right of the line.` : "Every token of the run, in order.";
  const charts = element("div", { class: "charts" });
  place.replaceChildren(element("h2", {}, decoded ? "Along the tokens, step by step" : "Along the tokens"), element("p", { class: "soft" }, says), charts);
  const draw = () => {
    const width = Math.max(260, place.clientWidth - 38);
    const parts = [];
    if (positions.length > 1) parts.push(tokenChart(report, width, "KL of the next token, in nats", "klchart", (at) => position(found, at), 1e-16, decoded));
    if (steps.length > 1) parts.push(tokenChart(report, width, "The worst op at each token: own error of its row", "stepchart", (at) => worstStep(report, at), 1e-16, decoded));
    charts.replaceChildren(...parts);
  };
  report.redraw.push(draw);
  draw();
}

// What a chart has at one token: a value, whether it is marked, and what the tip says.
function position(found, at) {
  const each = found.positions[at - found.first];
  if (!each) return null;
  const [kl, agrees, baseline, candidate] = each;
  return { value: kl, marked: agrees === false, lines: [known(kl) ? `KL ${tiny(kl)} nats` : "no KL: not all logits are there, or some are NaN", agrees === false ? `first token ${baseline} here, ${candidate} there` : `first token ${baseline}`] };
}
function worstStep(report, at) {
  const step = report.steps[at];
  if (!step) return null;
  return { value: step[1], marked: step[2] === WRONG, lines: [`${step[0]}: ${tiny(step[1])}`, report.verdicts[step[2]].toUpperCase()] };
}

function tokenChart(report, width, title, name, entry, least, decoded) {
  const [height, left, bottom] = [130, 46, 20];
  const count = report.tokens.length;
  const entries = report.tokens.map((_, at) => entry(at));
  const values = entries.filter((each) => each && known(each.value) && each.value > 0).map((each) => each.value);
  const scale = logarithmic(Math.max(least, Math.min(1e-8, ...values) / 10), Math.max(1, ...values), height - bottom, 14);
  const svg = drawing(width, height, title);
  axis(svg, scale, left, width - 4);
  const each = (width - left - 4) / count;
  entries.forEach((found, at) => {
    if (!found) return;
    const top = known(found.value) ? (found.value > 0 ? scale.place(found.value) : height - bottom) : 14;
    svg.append(shape("rect", { class: found.marked ? "fill-wrong" : "fill-soft", ...slot(left, each, at), y: Math.min(top, height - bottom - 1.5), height: Math.max(1.5, height - bottom - top) }));
    if (found.marked && each >= 8) svg.append(shape("text", { class: "ink", x: left + (at + 0.5) * each, y: top - 3, "text-anchor": "middle" }, "✗"));
  });
  if (decoded) {
    const x = left + report.prefill * each;
    svg.append(shape("line", { class: "one dash", x1: x, x2: x, y1: 2, y2: height - bottom }), shape("text", { x: x + 4 > width - 50 ? x - 4 : x + 4, y: 10, "text-anchor": x + 4 > width - 50 ? "end" : "start" }, "decode →"));
  }
  const step = every(count, width - left);
  for (let at = 0; at < count; at += step) svg.append(shape("text", { x: left + (at + 0.5) * each, y: height - 5, "text-anchor": "middle" }, at));
  const cover = shape("rect", { x: left, y: 0, width: width - left - 4, height, "fill-opacity": 0 });
  cover.addEventListener("pointermove", (event) => {
    const at = Math.min(count - 1, Math.max(0, Math.floor((event.clientX - svg.getBoundingClientRect().left - left) / each)));
    showTip(event, `token ${at} ${report.tokens[at]}`, entries[at] ? entries[at].lines : ["nothing was judged here"]);
  });
  cover.addEventListener("pointerleave", hideTip);
  svg.append(cover);
  const wrong = entries.filter((found) => found && found.marked).length;
  const marked = name === "klchart" ? "the first token is another" : "an op is wrong";
  return element("figure", { "data-figure": name }, element("figcaption", {}, `${title} `, element("span", {}, wrong ? `✗ ${marked}: ${wrong} of ${count}` : "")), svg);
}

function cacheSlots(report, place) {
  if (!report.slots.length) return;
  place.hidden = false;
  const parts = report.slots.map((side) => slotMap(report, side));
  const stored = report.slots.some((side) => side.stored);
  const says = stored ? "What each slot holds (kv_k, kv_v), against what the engine itself wrote there." : "The rows that are written to each slot, against what is right on their inputs; the cache itself was not recorded.";
  place.replaceChildren(element("h2", {}, "KV cache"), element("p", { class: "soft" }, `Layers down, slots across. ${says}`), element("div", { class: "two even" }, ...parts));
  if (parts.some((figure) => figure.querySelector("canvas"))) place.append(element("div", { class: "key" }, element("span", {}, "1e-16", ramp("ramp"), "1")));
}

function slotMap(report, side) {
  const grid = side.errors;
  const scale = report.scale;
  const levels = bytesOf(grid.levels);
  const wrong = new Set(side.wrong.map(([layer, slot]) => `${side.layers.indexOf(layer)} ${slot}`));
  const verdict = report.verdicts[side.verdict];
  const exact = levels.every((level) => level === 0) && !side.count;
  const canvas = element("canvas", { class: "errors", role: "img", "aria-label": `${side.side} slots: ${verdict}, ${side.count} wrong` });
  const draw = () => {
    canvas.width = grid.columns;
    canvas.height = grid.rows;
    const context = canvas.getContext("2d");
    levels.forEach((level, at) => {
      context.fillStyle = colour("ramp", level === 0 ? 0 : (Math.log10(errorAt(level, scale)) + 16) / 16);
      context.fillRect(at % grid.columns, Math.floor(at / grid.columns), 1, 1);
    });
  };
  draw();
  report.redraw.push(draw);
  canvas.style.height = `${Math.min(260, Math.max(40, grid.rows * 9))}px`;
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.min(grid.columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * grid.columns)));
    const row = Math.min(grid.rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * grid.rows)));
    const slot = Math.ceil((column * grid.of[1]) / grid.columns);
    showTip(event, `${side.side} of layer ${side.layers[row]}, slot ${part(column, grid.columns, grid.of[1])} ${report.tokens[slot] ?? ""}`, [`error ${tiny(errorAt(levels[row * grid.columns + column], scale))}`, wrong.has(`${row} ${slot}`) ? "WRONG" : ""]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  const first = side.wrong.slice(0, 6).map(([layer, slot]) => `layer ${layer} slot ${slot}`);
  const more = side.count > first.length ? ` and ${side.count - first.length} more` : "";
  const badge = element("b", { class: `badge small ${verdict}` }, `${GLYPH[side.verdict] || "✓"} ${verdict.toUpperCase()}`);
  const caption = element("figcaption", {}, `${side.side} `, badge, element("span", {}, ` ${side.word}${side.count ? `: wrong at ${first.join(", ")}${more}` : ""}`));
  const nothing = element("p", { class: "soft" }, `All ${grid.of[1]} slots of ${grid.of[0] === 1 ? "the layer" : `each of ${grid.of[0]} layers`} hold exactly what they should.`);
  return element("figure", { "data-figure": `slots-${side.side}` }, caption, exact ? nothing : canvas);
}

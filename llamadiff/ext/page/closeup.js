// One tap, opened: its numbers, the map of its errors, values at the worst place, histograms, profiles.

function closeupOf(report, cell, place, shut) {
  const seen = report.closeups[report.cells.indexOf(cell)];
  const close = element("button", { type: "button" }, "close");
  close.addEventListener("click", shut);
  const badge = element("b", { class: `badge small ${report.verdicts[cell.verdict]}` }, report.verdicts[cell.verdict].toUpperCase());
  const what = [cell.op, cell.weight && `by ${cell.weight}`, cell.shape && `[${cell.shape}]`].filter(Boolean).join(" ");
  const head = element("div", { class: "head" }, element("h2", { class: "mono" }, cell.tap), badge, element("span", { class: "soft" }, what), close);
  place.replaceChildren(head, numbersOf(cell, report));
  place.hidden = false;
  if (!seen) {
    place.append(element("p", { class: "soft" }, "There is no close-up of this tap: the page holds those around each divergence, and of the worst of each kind."));
    return;
  }
  const left = element("div", { class: "charts" }, errorMap(report, seen), valuesOf(report, seen));
  const right = element("div", { class: "charts" });
  const panels = element("div", { class: "panels" }, left, right);
  place.append(panels);
  const room = Math.max(240, right.clientWidth);
  right.append(histogram(report, seen, room), profile(seen.per_row, room, cell, `By ${seen.axes[0]}`, "NMSE of each row"));
  if (seen.heads.length > 1) right.append(profile(seen.heads, room, cell, "By head", "NMSE of each head"));
}

function numbersOf(cell, report) {
  const entries = [
    ["own error", known(cell.own) && tiny(cell.own)],
    ["limit", known(cell.limit) && `${tiny(cell.limit)}${cell.times ? ` (${times(cell.times)})` : ""}`],
    ["arithmetic", cell.arithmetic],
    ["drift", known(cell.drift) && tiny(cell.drift)],
    ["× rounding", known(cell.rounding) && times(cell.rounding)],
    ["cosine", known(cell.cosine) && cell.cosine.toFixed(6)],
    ["mean drift", known(cell.mean_drift) && number(cell.mean_drift)],
    [`rms ${report.names[0]} → ${report.names[1]}`, known(cell.b_rms) && known(cell.c_rms) && `${number(cell.b_rms)} → ${number(cell.c_rms)}`],
    [`worst at [${cell.place}]`, known(cell.recorded) && cell.place && cell.own !== 0 && `${number(cell.recorded)}, right is ${number(cell.expected)}`],
    ["answers for", cell.span],
    ["not finite", (cell.b_bad || cell.c_bad) && `${cell.b_bad ?? 0} → ${cell.c_bad ?? 0} values`],
  ];
  return element("dl", { class: "numbers" }, ...entries.filter(([, value]) => value).map(([name, value]) => element("div", {}, element("dt", {}, name), element("dd", {}, value))));
}

// Which rows or columns a cell of a coarse map stands for.
const part = (at, cells, of) => {
  const [first, next] = [Math.ceil((at * of) / cells), Math.ceil(((at + 1) * of) / cells)];
  return next - first > 1 ? `${first} to ${next - 1}` : `${first}`;
};

function errorMap(report, seen) {
  const grid = seen.errors;
  const label = `Errors by ${seen.axes[0]} and ${seen.axes[1]}; the worst at ${seen.axes[0]} ${seen.worst[0]}, ${seen.axes[1]} ${seen.worst[1]}`;
  const canvas = element("canvas", { class: "errors", role: "img", "aria-label": label });
  const levels = paint(canvas, grid, report.scale);
  canvas.style.height = `${Math.min(320, Math.max(96, grid.rows * 14))}px`;
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.min(grid.columns - 1, Math.max(0, Math.floor(((event.clientX - box.left) / box.width) * grid.columns)));
    const row = Math.min(grid.rows - 1, Math.max(0, Math.floor(((event.clientY - box.top) / box.height) * grid.rows)));
    const token = seen.axes[0] === "token" || seen.axes[0] === "query" ? report.tokens[Math.ceil((row * grid.of[0]) / grid.rows)] : "";
    showTip(event, `${seen.axes[0]} ${part(row, grid.rows, grid.of[0])}${token ? ` ${token}` : ""}, ${seen.axes[1]} ${part(column, grid.columns, grid.of[1])}`, [`largest error ${tiny(errorAt(levels[row * grid.columns + column], report.scale))} of the rms`]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  const coarse = grid.rows < grid.of[0] || grid.columns < grid.of[1];
  const caption = element("figcaption", {}, `${seen.axes[0]} × ${seen.axes[1]} `, element("span", {}, `${seen.within ? `${seen.within}, ` : ""}${grid.of[0]} × ${grid.of[1]}${coarse ? ", of each cell the worst value" : ""}`));
  const key = element("div", { class: "key" }, element("span", {}, `1e${HEAT[0]}`, ramp("ramp"), "3 × rms"), element("span", {}, `worst: ${seen.axes[0]} ${seen.worst[0]}, ${seen.axes[1]} ${seen.worst[1]}`));
  return element("figure", { "data-figure": "errors" }, caption, canvas, key);
}

function valuesOf(report, seen) {
  const { start, expected, recorded } = seen.window;
  const sides = [...expected, ...recorded].filter(known).map(Math.abs);
  const size = Math.max(1e-30, ...sides);
  const cells = (values) =>
    values.map((value, i) => {
      const cell = element("td", {}, number(value));
      const at = known(value) ? 0.5 + (0.5 * value) / size : 0.5;
      cell.style.background = colour("split", at);
      cell.style.color = inkOn("split", at);
      if (start + i === seen.worst[1]) cell.className = "worst";
      return cell;
    });
  const heads = expected.map((_, i) => element("th", { scope: "col" }, start + i));
  const side = report.judged ? ["right", "recorded"] : report.names;
  const table = element(
    "table",
    { class: "values" },
    element("thead", {}, element("tr", {}, element("th", {}, seen.axes[1]), ...heads)),
    element("tbody", {}, element("tr", {}, element("th", { scope: "row" }, side[0]), ...cells(expected)), element("tr", {}, element("th", { scope: "row" }, side[1]), ...cells(recorded))),
  );
  const caption = element("figcaption", {}, "At the worst place ", element("span", {}, `${seen.axes[0]} ${seen.worst[0]}${seen.within ? `, ${seen.within}` : ""}`));
  return element("figure", { "data-figure": "values" }, caption, scrolled(table));
}

// A table that may be wider than its place, with its marked cell in the middle.
function scrolled(table) {
  const place = element("div", { class: "scroll", tabindex: "0" }, table);
  requestAnimationFrame(() => {
    const marked = table.querySelector(".worst");
    if (marked) place.scrollLeft = marked.offsetLeft - place.clientWidth / 2;
  });
  return place;
}

function histogram(report, seen, room) {
  const { low, high, expected, recorded } = seen.histogram;
  const [width, height, left] = [room, 110, 8];
  const most = Math.max(1, ...expected, ...recorded);
  const svg = drawing(width, height, `Histogram of values from ${number(low)} to ${number(high)}`);
  const y = (count) => height - 18 - (Math.log1p(count) / Math.log1p(most)) * (height - 26);
  const x = (bin) => left + (bin / expected.length) * (width - 2 * left);
  const outline = (counts) => counts.map((count, bin) => `${bin ? "L" : "M"}${x(bin)},${y(count)}L${x(bin + 1)},${y(count)}`).join("");
  svg.append(shape("path", { class: "line one", d: outline(expected) }), shape("path", { class: "line two-line dash", d: outline(recorded) }));
  svg.append(shape("text", { x: left, y: height - 4 }, number(low)), shape("text", { x: width - left, y: height - 4, "text-anchor": "end" }, number(high)));
  const names = report.judged ? ["right", "recorded"] : report.names;
  return element("figure", { "data-figure": "histogram" }, element("figcaption", {}, "Values ", element("span", {}, "how many, on a logarithmic scale")), svg, legend(names));
}

function legend(names) {
  return element("div", { class: "key" }, element("span", {}, element("i", { class: "swatch one" }), names[0]), element("span", {}, element("i", { class: "swatch two" }), `${names[1]} (dashed)`));
}

function profile(errors, room, cell, title, says) {
  const [width, height, left] = [room, 118, 44];
  const real = errors.filter((error) => known(error) && error > 0);
  const low = Math.min(1e-16, ...real);
  const high = Math.max(1, ...real);
  const scale = logarithmic(Math.max(low, 1e-18), high, height - 18, 8);
  const svg = drawing(width, height, `${title}: ${says}`);
  axis(svg, scale, left, width - 4);
  const each = (width - left - 4) / errors.length;
  errors.forEach((error, at) => {
    const top = known(error) ? (error > 0 ? scale.place(error) : height - 18) : 8;
    const bar = shape("rect", { class: known(cell.limit) && (!known(error) || error > cell.limit) ? "fill-wrong" : "fill-soft", ...slot(left, each, at), y: top, height: Math.max(1, height - 18 - top) });
    bar.append(shape("title", {}, `${at}: ${known(error) ? tiny(error) : "not finite"}`));
    svg.append(bar);
  });
  if (known(cell.limit) && cell.limit > 0) {
    const y = scale.place(cell.limit);
    svg.append(shape("line", { class: "one dash", x1: left, x2: width - 4, y1: y, y2: y }), shape("text", { class: "over", x: width - 6, y: y - 4, "text-anchor": "end" }, `limit ${tiny(cell.limit)}`));
  }
  const step = every(errors.length, width - left);
  for (let at = 0; at < errors.length; at += step) svg.append(shape("text", { x: left + (at + 0.5) * each, y: height - 4, "text-anchor": "middle" }, at));
  return element("figure", { "data-figure": "profile" }, element("figcaption", {}, `${title} `, element("span", {}, says)), svg);
}

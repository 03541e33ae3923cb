// Curves over the layers, of both sides; the next tokens of both sides.

function curves(report, place) {
  const columns = report.columns.map((label, column) => [label, report.cells.filter((cell) => cell.column === column && known(cell.b_rms) && known(cell.c_rms))]).filter(([, cells]) => cells.length > 1);
  if (!columns.length) return;
  place.hidden = false;
  const choice = element("select", { "aria-label": "Which tap the curves are of" }, ...columns.map(([label]) => element("option", {}, label)));
  const preferred = columns.findIndex(([label]) => label === "l_out");
  choice.selectedIndex = preferred >= 0 ? preferred : columns.length - 1;
  const charts = element("div", { class: "charts" });
  const draw = () => {
    const [label, cells] = columns[choice.selectedIndex];
    charts.replaceChildren(...["rms", "mean", "max"].map((name) => curve(report, cells, name, Math.max(260, place.clientWidth - 38))), legend(report.names));
    says.textContent = label === "l_out" && report.growth ? `Is it normal? ${capital(report.growth)}.` : "Both sides' values at this tap, layer by layer.";
  };
  const says = element("p", { class: "soft", "data-text": "growth" });
  choice.addEventListener("change", draw);
  place.replaceChildren(element("h2", {}, "Over the layers ", choice), says, charts);
  report.redraw.push(draw);
  draw();
}
const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function curve(report, cells, name, width) {
  const [height, left, right] = [name === "rms" ? 128 : 92, 52, 10];
  const sides = ["b", "c"].map((side) => cells.map((cell) => cell[`${side}_${name}`]));
  const values = sides.flat().filter(known);
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const steep = low > 0 && high / low > 20;
  const scale = steep ? logarithmic(low, high, height - 16, 8) : linear(name === "rms" ? Math.min(0, low) : low, high === low ? low + 1 : high, height - 16, 8);
  const svg = drawing(width, height, `${name} of ${cells[0].tap} to ${cells[cells.length - 1].tap}`);
  axis(svg, scale, left, width - right);
  const x = (at) => left + (cells.length > 1 ? at / (cells.length - 1) : 0.5) * (width - left - right);
  const path = (side) => side.map((value, at) => (known(value) ? `${at && known(side[at - 1]) ? "L" : "M"}${x(at).toFixed(1)},${scale.place(value).toFixed(1)}` : "")).join("");
  svg.append(shape("path", { class: "line one", d: path(sides[0]) }), shape("path", { class: "line two-line dash", d: path(sides[1]) }));
  const step = every(cells.length, width - left - right);
  cells.forEach((cell, at) => {
    if (at % step === 0) svg.append(shape("text", { x: x(at), y: height - 3, "text-anchor": "middle" }, cell.layer));
  });
  const cover = shape("rect", { x: left, y: 0, width: width - left - right, height: height - 14, "fill-opacity": 0 });
  cover.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = Math.round(((event.clientX - box.left - left) / (width - left - right)) * (cells.length - 1));
    const cell = cells[Math.min(cells.length - 1, Math.max(0, at))];
    showTip(event, cell.tap, [`${name}: ${report.names[0]} ${number(cell[`b_${name}`])}`, `${report.names[1]} ${number(cell[`c_${name}`])}`]);
  });
  cover.addEventListener("pointerleave", hideTip);
  svg.append(cover);
  return element("figure", { "data-figure": name }, element("figcaption", {}, `${name === "rms" ? "RMS" : name}${steep ? " " : ""}`, element("span", {}, steep ? "logarithmic" : "")), svg);
}

function logits(report, place) {
  const found = report.logits;
  if (!found) return;
  place.hidden = false;
  const apart = found.bad.length ? `the last row of ${found.bad.join(" and ")} holds NaN or Inf` : found.partial ? "not all logits were recorded" : `KL ${tiny(found.kl)} nats`;
  const same = found.agree === null ? "whether the first token is the same is unknown" : found.agree ? "the first token is the same" : "the first token is another";
  place.replaceChildren(element("h2", {}, "Does it matter?"), element("p", { class: "soft" }, `After the last token: ${apart}; ${same}. ${found.agreeing} of ${found.rows} rows have the same first token.`));
  if (!found.top.length) return;
  const draw = () => {
    const width = Math.max(260, place.clientWidth - 38);
    const values = found.top.flatMap((top) => [top[1], top[2]]).filter(known);
    const [low, high] = [Math.min(0, ...values), Math.max(...values, 0.001)];
    const [label, tail, step] = [Math.min(150, width * 0.36), 92, 25];
    const bar = (value) => ((value - low) / (high - low)) * (width - label - tail);
    const svg = drawing(width, found.top.length * step + 4, "Logits of the first tokens of both sides");
    found.top.forEach(([text, b, c, rank, there], at) => {
      const y = 4 + at * step;
      svg.append(shape("text", { class: "mono", x: label - 8, y: y + 13, "text-anchor": "end" }, cut(text, Math.floor(label / 7.2))));
      svg.append(shape("rect", { class: "fill-one", x: label, y, width: Math.max(1, bar(b)), height: 8, rx: 2 }));
      if (known(c)) svg.append(shape("rect", { class: "fill-two", x: label, y: y + 10, width: Math.max(1, bar(c)), height: 8, rx: 2 }));
      const values = known(c) ? `${b.toFixed(2)} / ${c.toFixed(2)}` : b.toFixed(2);
      svg.append(shape("text", { x: width, y: y + 8, "text-anchor": "end" }, values));
      svg.append(shape("text", { class: rank === there ? "" : "ink", x: width, y: y + 19, "text-anchor": "end" }, known(c) ? (rank === there ? `rank ${rank}` : `rank ${rank} → ${there}`) : `rank ${rank}`));
    });
    chart.replaceChildren(svg, element("div", { class: "key" }, element("span", {}, element("i", { class: "swatch one" }), `${report.names[0]}, above`), element("span", {}, element("i", { class: "swatch two" }), `${report.names[1]}, below`)));
  };
  const chart = element("figure", { "data-figure": "logits" });
  place.append(chart);
  report.redraw.push(draw);
  draw();
}

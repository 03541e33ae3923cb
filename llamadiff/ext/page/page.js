// The page: every report's pictures, drawn when it is first shown, and again when width or theme change.

const everything = JSON.parse(document.getElementById("data").textContent);
const sheets = [...document.querySelectorAll("main.report")];
const shown = new Map();

function opened(data) {
  const cells = data.cells.map((values) => Object.fromEntries(data.fields.map((field, at) => [field, values[at]])));
  return { ...data, cells, leading: known(data.leading) ? cells[data.leading] : null, judged: cells.some((cell) => known(cell.own)), redraw: [] };
}

function begin(sheet) {
  const data = everything[Number(sheet.dataset.number)];
  if (!data) return { redraw: [] };
  const report = opened(data);
  const place = (name) => sheet.querySelector(`[data-place=${name}]`);
  const panel = place("closeup");
  let open = null;
  let back = () => {};
  const shut = () => {
    panel.hidden = true;
    back();
  };
  panel.addEventListener("keydown", (event) => event.key === "Escape" && shut());
  const openTap = (cell, go) => {
    hideTip();
    open = cell;
    closeupOf(report, cell, panel, shut);
    if (go) {
      panel.focus({ preventScroll: true });
      panel.scrollIntoView({ block: "nearest" });
    }
  };
  if (place("map") && report.cells.length) {
    const map = new TapMap(report, place("map"), openTap);
    map.switches(place("switches"));
    map.draw();
    report.redraw.push(() => map.draw());
    back = () => map.svg.focus({ preventScroll: true });
    const first = report.leading && map.spotOf(report.leading);
    if (first) {
      map.cursor = first;
      map.mark(first);
      map.reveal(first);
    }
    for (const link of sheet.querySelectorAll("[data-opens]")) {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        const cell = report.cells.find((each) => each.tap === link.dataset.opens);
        if (!cell) return;
        map.cursor = map.spotOf(cell);
        map.mark(map.cursor);
        map.reveal(map.cursor);
        openTap(cell, true);
      });
    }
  }
  place("logits").hidden = !report.logits; // the room that curves have depends on it
  curves(report, place("curves"));
  logits(report, place("logits"));
  timeline(report, place("timeline"));
  cacheSlots(report, place("slots"));
  report.redraw.push(() => panel.hidden || closeupOf(report, open, panel, shut));
  if (report.leading) openTap(report.leading, false);
  return report;
}

function show(number) {
  for (const sheet of sheets) sheet.hidden = Number(sheet.dataset.number) !== number;
  for (const link of document.querySelectorAll("[data-shows]")) {
    if (Number(link.dataset.shows) === number) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  if (!shown.has(number)) shown.set(number, begin(sheets.find((sheet) => Number(sheet.dataset.number) === number)));
}

for (const link of document.querySelectorAll("[data-shows]")) {
  link.addEventListener("click", (event) => {
    event.preventDefault();
    show(Number(link.dataset.shows));
  });
}

const redraw = () => {
  for (const report of shown.values()) for (const draw of report.redraw) draw();
};
let width = window.innerWidth;
let waiting = 0;
window.addEventListener("resize", () => {
  if (window.innerWidth === width) return;
  width = window.innerWidth;
  clearTimeout(waiting);
  waiting = setTimeout(redraw, 120);
});
darkness.addEventListener("change", redraw);
document.addEventListener("scroll", hideTip, { passive: true });

const worst = sheets.findIndex((sheet) => sheet.querySelector(".verdict.wrong"));
show(Math.max(0, worst));
document.documentElement.dataset.ready = "true";

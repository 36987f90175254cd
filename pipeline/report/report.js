// Draws the curves with plotly in the colours of the style sheet, again when they change (dark, light, print).
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const root = document.documentElement;
  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  const checked = (id) => document.getElementById(id)?.checked ?? false;
  // A finger that scrolls the page must not zoom a curve.
  const touch = matchMedia("(pointer: coarse)").matches;
  const config = { displayModeBar: false, responsive: true, scrollZoom: false };

  const trace = (curve) => ({
    x: curve.x, y: curve.y, name: curve.name, type: "scatter", mode: curve.marks ? "lines+markers" : "lines",
    opacity: curve.faint ? 0.3 : 1, hoverinfo: curve.faint ? "skip" : undefined, showlegend: false,
    line: { color: color(curve.color), width: curve.faint ? 1 : 2 }, marker: { size: 7 },
  });
  const level = (line) => ({
    type: "line", xref: "paper", x0: 0, x1: 1, y0: line.y, y1: line.y,
    line: { color: color("muted"), width: 1, dash: "dot" },
  });
  // Side by side, because bzip2 and xz need nearly the same; on the left, where the curve is still high.
  const levelName = (line, place) => ({
    xref: "paper", x: 0.02 + 0.17 * place, xanchor: "left", y: line.y, yanchor: "bottom", showarrow: false, text: line.name,
    font: { size: 11, color: color("muted") },
  });
  const axis = (title, more) => ({
    title: { text: title, font: { size: 12 }, standoff: 8 }, gridcolor: color("line"), zeroline: false,
    linecolor: color("line"), automargin: true, fixedrange: touch, nticks: 6, ...more,
  });
  const layout = (chart) => ({
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", margin: { l: 8, r: 12, t: 14, b: 8 },
    font: { family: color("sans"), size: 12, color: color("muted") }, hovermode: "x unified",
    hoverlabel: { bgcolor: color("surface"), bordercolor: color("line"), font: { color: color("ink") } },
    dragmode: touch ? false : "zoom", shapes: chart.levels.map(level), annotations: chart.levels.map(levelName),
    xaxis: axis("step", { type: checked("log-steps") && !chart.linear ? "log" : "linear", hoverformat: ",d",
      ...(checked("log-steps") && !chart.linear ? { dtick: 1, nticks: undefined } : {}) }),
    yaxis: axis("", { type: chart.log ? "log" : "linear", hoverformat: ".4~g", rangemode: chart.zero ? "tozero" : "normal" }),
  });
  const draw = () => charts.forEach((chart) => {
    const curves = chart.curves.filter((curve) => !curve.smoothed || checked("smooth"));
    const plain = !checked("smooth");
    Plotly.react(chart.id, curves.map((curve) => trace(plain ? { ...curve, faint: false } : curve)), layout(chart), config);
  });

  draw();
  document.querySelectorAll(".switch input").forEach((input) => input.addEventListener("change", draw));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  // Paper is white, and what is folded cannot be unfolded on it.
  let folded = [];
  addEventListener("beforeprint", () => {
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((part) => { part.open = true; });
    root.dataset.print = "";
    draw();
  });
  addEventListener("afterprint", () => {
    folded.forEach((part) => { part.open = false; });
    delete root.dataset.print;
    draw();
  });
})();

// The plot of loss against speed, drawn by Plotly over its static twin: hover names an architecture, a click shows it.
// A browser that cannot unpack Plotly keeps the static figure, whose points link to the same panels.
(async () => {
  if (typeof DecompressionStream === "undefined") return;
  const element = (id) => document.getElementById(id);
  const packed = Uint8Array.from(atob(element("plotly-gzip").textContent), (letter) => letter.charCodeAt(0));
  const library = document.createElement("script");
  library.textContent = await new Response(
    new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip")),
  ).text();
  document.head.append(library);

  const plot = element("plot");
  const panels = document.querySelector(".solutions");
  const front = JSON.parse(element("front-data").textContent);
  element("front").classList.add("scripted");
  panels.classList.add("scripted");

  const show = (number) => {
    const panel = element(`solution-${number}`);
    if (!panel) return;
    panels.querySelectorAll(".shown").forEach((other) => other.classList.remove("shown"));
    panel.classList.add("shown");
  };
  const fromAddress = () => show((location.hash.match(/^#solution-(\d+)$/) || [, panels.dataset.first])[1]);

  const draw = () => {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    const narrow = plot.clientWidth < 560;
    const errors = (points, key, tint) => ({ type: "data", array: points.map((p) => p[key]), color: tint, thickness: 1, width: 0 });
    const traces = front.series.map((series) => ({
      type: "scatter",
      name: series.name,
      mode: series.dash ? "lines+markers" : "markers",
      x: series.points.map((p) => p.x),
      y: series.points.map((p) => p.y),
      error_x: errors(series.points, "dx", colour(series.colour)),
      error_y: errors(series.points, "dy", colour(series.colour)),
      customdata: series.points.map((p) => p.solution),
      text: series.points.map((p) => p.text),
      hovertemplate: "%{text}<extra></extra>",
      line: { color: colour(series.colour), dash: series.dash || "solid", width: 1.4 },
      marker: {
        symbol: series.symbol,
        size: series.size + 3,
        color: series.points.map((p) => colour(p.estimated ? "paper" : series.face)),
        line: { color: colour(series.colour), width: 1.4 },
      },
    }));
    const speeds = [front.parent, ...front.series.flatMap((series) => series.points.map((p) => p.x))];
    const [slow, fast] = [Math.min(...speeds), Math.max(...speeds)];
    const margin = 0.05 * (fast - slow || fast);
    const ticks = [-4, -3, -2, -1, 0, 1].flatMap((power) => [1, 2, 5].map((n) => Number(`${n}e${power}`)));
    const axis = { gridcolor: colour("rule"), linecolor: colour("rule"), zeroline: false, tickfont: { color: colour("muted") }, automargin: true };
    const title = (text) => ({ text, font: { color: colour("muted"), size: 13 } });
    const layout = {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.getPropertyValue("--sans"), size: 12.5, color: colour("ink") },
      margin: { l: 8, r: 8, t: 26, b: 8 },
      dragmode: matchMedia("(pointer: fine)").matches ? "zoom" : false,
      hovermode: "closest",
      hoverlabel: { bgcolor: colour("panel"), bordercolor: colour("rule"), font: { color: colour("ink"), size: 12.5 }, align: "left" },
      legend: { orientation: "h", y: narrow ? -0.2 : -0.16, yanchor: "top", x: 0, font: { size: 12 } },
      xaxis: { ...axis, title: title(front.x), range: [slow - margin, fast + margin], nticks: narrow ? 5 : 9 },
      yaxis: { ...axis, type: "log", tickvals: ticks, ticktext: ticks.map(String), title: title(narrow ? "KL from the parent" : "KL divergence from the parent (lower is better)") },
      shapes: [{ type: "line", x0: front.parent, x1: front.parent, yref: "paper", y0: 0, y1: 1, line: { color: colour("kept"), width: 1, dash: "dash" } }],
      annotations: [{ x: front.parent, yref: "paper", y: 1, yanchor: "bottom", xanchor: "left", text: "parent (KL 0)", showarrow: false, font: { color: colour("muted"), size: 12 } }],
    };
    return Plotly.react(plot, traces, layout, { displayModeBar: false, responsive: true });
  };

  draw().then(() => plot.on("plotly_click", (event) => {
    const number = event.points[0].customdata;
    history.replaceState(null, "", `#solution-${number}`);
    show(number);
  }));
  fromAddress();
  addEventListener("hashchange", fromAddress);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();

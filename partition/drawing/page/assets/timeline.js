/**
 * Draw the memory over a step: bytes alive, stacked by group, forward then backward.
 *
 * Reads `steps`, `boundary` (the index of the first backward step), `groupings` (each with groups whose `bytes` add up
 * to `total`), `total`, `peak` (step, bytes, and if known `arrays`, the largest alive there: bytes, type, op, source),
 * `ghost` (another run, whose halves are stretched over ours), `lines` (levels in bytes) and `note`. Step i is drawn
 * from i to i + 1. The reader may leave the ghost out, and the rest grows into its room.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});
  const { d3 } = globalThis.jointcutVendor;

  const FONT = 12;
  const LINE = 16;
  const MARGIN = { top: 52, right: 18, bottom: 46, left: 58 };
  const LETTERS = "ABCDEFGHI";

  // ------------------------------------------------------------------------------------------ from data to pixels

  /** Points `{x, bytes}` of another run, its halves stretched over ours, with a last one where the step ends. */
  function stretched(ghost, section) {
    const [ours, all] = [section.boundary, section.steps.length];
    const count = ghost.total.length;
    const at = (index) => (index < ghost.boundary
      ? (index * ours) / ghost.boundary
      : ours + ((index - ghost.boundary) * (all - ours)) / Math.max(1, count - ghost.boundary));
    const points = ghost.total.map((bytes, index) => ({ x: at(index), bytes }));
    return [...points, { x: all, bytes: ghost.total[count - 1] }];
  }

  /** Scales and sizes of a picture `width` pixels wide. */
  function frameOf(section, width) {
    const height = Math.round(Math.max(300, Math.min(460, 0.44 * width)));
    const plot = { x: MARGIN.left, y: MARGIN.top, width: width - MARGIN.left - MARGIN.right,
      height: height - MARGIN.top - MARGIN.bottom };
    const ghost = section.ghost ? section.ghost.total : [];
    const most = d3.max([1, ...section.total, ...ghost, ...section.lines.map((line) => line.bytes)]);
    const unit = J.byteUnit(most);
    const headroom = 1 + 40 / plot.height;
    const x = d3.scaleLinear([0, Math.max(1, section.steps.length)], [plot.x, plot.x + plot.width]);
    const y = d3.scaleLinear([0, (most * headroom) / unit.divisor], [plot.y + plot.height, plot.y]);
    return { width, height, plot, unit, x, y, yOf: (bytes) => y(bytes / unit.divisor) };
  }

  /** Each group with the bytes below and above it at every step, the first at the bottom. */
  function stacked(groups) {
    let below = groups[0].bytes.map(() => 0);
    return groups.map((group) => {
      const lower = below;
      below = lower.map((bytes, step) => bytes + group.bytes[step]);
      return { lower, upper: below };
    });
  }

  // ------------------------------------------------------------------------------------------------------- marks

  /** The two sides: their words, a band above each, and the line between them. */
  function sides(section, frame) {
    const { plot, x } = frame;
    const middle = x(section.boundary);
    const ends = { forward: [plot.x, middle], backward: [middle, plot.x + plot.width] };
    const room = { x: plot.x, y: plot.y - 26, width: plot.width, height: LINE };
    const words = [];
    const taken = [];
    for (const [side, [from, to]] of Object.entries(ends)) {
      if (to - from <= 0) continue;
      const width = J.width(side, FONT, 650) + 8;
      const place = J.place({ width, height: LINE, at: [{ x: (from + to - width) / 2, y: room.y }] }, room, taken);
      words.push(J.svg("rect", { class: `band-${side}`, x: from, y: plot.y - 8, width: to - from, height: 4, rx: 2 }));
      if (!place) continue;
      taken.push(place);
      words.push(J.svg("text", { class: `side-word word-${side}`, x: place.x + 4, y: place.y + 12 }, side));
    }
    return [words, J.svg("line", { class: "boundary", x1: middle, x2: middle, y1: plot.y - 12,
      y2: plot.y + plot.height })];
  }

  /** The areas, one path per group. */
  function layers(groups, bands, frame) {
    const steps = d3.range(groups[0].bytes.length + 1);
    return groups.map((group, index) => {
      const last = (list, step) => list[Math.min(step, list.length - 1)];
      const { lower, upper } = bands[index];
      const area = d3.area().curve(d3.curveStepAfter).x((step) => frame.x(step))
        .y0((step) => frame.yOf(last(lower, step))).y1((step) => frame.yOf(last(upper, step)));
      const edge = area.lineY1();
      const key = J.hue(groups, index);
      return J.svg("g", { class: "layer", "data-group": group.name },
        J.svg("path", { d: area(steps), style: `fill: ${J.palette[key]}` }),
        J.svg("path", { d: edge(steps), style: `fill: none; stroke: ${J.outlines[key]}; stroke-width: 1` }));
    });
  }

  /** A level in bytes across the plot. */
  const level = (line, frame) =>
    J.svg("line", { class: "level", x1: frame.plot.x, x2: frame.plot.x + frame.plot.width,
      y1: frame.yOf(line.bytes), y2: frame.yOf(line.bytes) });

  // ------------------------------------------------------------------------------------------------------ labels

  /** A label's text, `name 47.2 MB`, its name shortened until it fits the plot. */
  function labelled(name, bytes, frame) {
    const figure = `: ${J.bytes(bytes)}`;
    return J.fitted(name, frame.plot.width - J.width(figure, FONT, 650) - 16, FONT, 650) + figure;
  }

  /** What is labelled in the plot, in the order of importance: the text, its anchor, and the places it would like. */
  function wishes(section, frame) {
    const { plot, x, yOf } = frame;
    const tip = (name, anchorX, bytes) => {
      const text = labelled(name, bytes, frame);
      const width = J.width(text, FONT, 650) + 8;
      const anchor = { x: anchorX, y: yOf(bytes) };
      const at = [[-width / 2, -26], [8, -22], [-width - 8, -22], [12, -8], [-width - 12, -8]];
      return { text, width, anchor, at: at.map(([dx, dy]) => ({ x: anchor.x + dx, y: anchor.y + dy })) };
    };
    const across = (line) => {
      const text = labelled(line.name, line.bytes, frame);
      const width = J.width(text, FONT, 650) + 8;
      const lefts = [plot.x + plot.width - width, plot.x + 4, plot.x + (plot.width - width) / 2];
      const at = [-LINE - 2, 3].flatMap((dy) => lefts.map((left) => ({ x: left, y: yOf(line.bytes) + dy })));
      return { text, width, anchor: null, level: yOf(line.bytes), at };
    };
    const found = [tip("peak", x(section.peak.step + 0.5), section.peak.bytes)];
    if (section.ghost) {
      const { step, bytes } = section.ghost.peak;
      const points = stretched(section.ghost, section);
      found.push(tip(section.ghost.name, x((points[step].x + points[step + 1].x) / 2), bytes));
    }
    return [...found, ...section.lines.map(across)];
  }

  /** What a label had better not lie on: the ghost's line, levels, and the line between the sides. */
  function shunned(section, frame) {
    const { plot, x } = frame;
    const boundary = { x: x(section.boundary) - 3, y: plot.y, width: 6, height: plot.height };
    const levels = section.lines.map((line) => ({ ...plot, y: frame.yOf(line.bytes) - 1, height: 2 }));
    if (!section.ghost) return [boundary, ...levels];
    const points = stretched(section.ghost, section).map((point) => ({ x: x(point.x), y: frame.yOf(point.bytes) }));
    return [boundary, ...levels, ...points.slice(1).map((point, index) => {
      const [top, foot] = d3.extent([point.y, points[index].y]);
      return { x: points[index].x, y: top - 2, width: point.x - points[index].x + 1, height: foot - top + 4 };
    })];
  }

  /** Draw the labels where they touch neither each other nor a dot; what finds no place stands in the legend alone. */
  function labels(section, frame) {
    const wanted = wishes(section, frame);
    const dot = ({ x, y }) => ({ x: x - 5, y: y - 5, width: 10, height: 10 });
    const taken = wanted.filter((wish) => wish.anchor).map((wish) => dot(wish.anchor));
    const drawn = wanted.map((wish) => {
      const place = J.place({ width: wish.width, height: LINE, at: wish.at }, frame.plot, taken,
        shunned(section, frame));
      if (!place) return null;
      taken.push(place);
      return [leader(wish, place),
        J.svg("text", { class: "label strong", x: place.x + 4, y: place.y + 12 }, wish.text)];
    });
    const dots = wanted.filter((wish) => wish.anchor)
      .map(({ anchor }) => J.svg("circle", { class: "peak-dot", cx: anchor.x, cy: anchor.y, r: 4.5 }));
    return { nodes: [drawn, dots], taken };
  }

  /** A thin line from a label to what it names, where it had to stand apart. */
  function leader(wish, place) {
    const middle = { x: place.x + place.width / 2, y: place.y + place.height / 2 };
    const to = wish.anchor ?? { x: middle.x, y: wish.level };
    const edge = { x: Math.max(place.x, Math.min(to.x, place.x + place.width)),
      y: to.y > middle.y ? place.y + place.height : place.y };
    if (Math.hypot(edge.x - to.x, edge.y - to.y) < 24) return null;
    return J.svg("line", { class: "leader", x1: edge.x, y1: edge.y, x2: to.x, y2: to.y });
  }

  /** The letter of each group, written where its area is thickest, if it is thick enough anywhere. */
  function keys(groups, bands, frame, taken) {
    const perStep = frame.x(1) - frame.x(0);
    const reach = perStep > 16 ? 0 : Math.ceil(8 / perStep);
    return groups.map((group, index) => {
      const tops = bands[index].upper.map(frame.yOf);
      const feet = bands[index].lower.map(frame.yOf);
      let best = null;
      for (let step = reach; step < tops.length - reach; step += 1) {
        const top = d3.max(tops.slice(step - reach, step + reach + 1));
        const thick = d3.min(feet.slice(step - reach, step + reach + 1)) - top;
        if (thick < 17 || (best && thick <= best.thick)) continue;
        const place = { x: frame.x(step + 0.5) - 7, y: top + thick / 2 - 7, width: 14, height: 14 };
        if (!taken.some((other) => J.meet(place, other))) best = { thick, place };
      }
      if (!best) return null;
      const { x, y } = best.place;
      taken.push(best.place);
      return J.svg("g", { class: "layer", "data-group": group.name },
        J.svg("rect", { class: "layer-key-plate", x, y, width: 14, height: 14, rx: 3 }),
        J.svg("text", { class: "layer-key", x: x + 7, y: y + 11 }, LETTERS[index % 9]));
    });
  }

  // ------------------------------------------------------------------------------------------- beside the picture

  /** The whole picture in words. */
  function summary(section) {
    const { peak, ghost, steps, boundary, lines } = section;
    const side = peak.step < boundary ? "forward" : "backward";
    return [
      `Memory over one step of ${J.count(steps.length, "operation")}; the backward begins after ${J.number(boundary)}.`,
      `The peak is ${J.bytes(peak.bytes)}, in the ${side}, at ${J.where(steps[peak.step])}.`,
      ghost && `${ghost.name} peaks at ${J.bytes(ghost.peak.bytes)}.`,
      ...lines.map((line) => `${line.name}: ${J.bytes(line.bytes)}.`),
    ].filter(Boolean).join(" ");
  }

  /** The operation that runs at the peak, in one line; its place whole in the title. */
  function atPeak({ steps, peak }) {
    const step = steps[peak.step];
    const what = [step.op, J.line(step.source)].filter(Boolean).join(", ");
    const turn = `(operation ${J.number(peak.step + 1)} of ${J.number(steps.length)})`;
    return J.element("p", { class: "legend-title", title: J.where(step) }, `Alive at the peak${J.per}: ${what} ${turn}`);
  }

  const left = (name) => ({ name, align: "left", sort: true });
  const right = (name) => ({ name, align: "right", sort: true });

  /** A table of what each group holds at the peak, and at its own most. */
  function groupFigures(section, groups) {
    const element = J.element("div", { class: "peak-groups" });
    const at = (group) => group.bytes[section.peak.step];
    J.table(element, {
      columns: [left("group"), right(`at the peak${J.per}`), right(`at its own most${J.per}`)],
      rows: groups.map((group) => [group.name, J.size(at(group)), J.size(d3.max(group.bytes))]),
      keys: groups.map((group) => [group.name, at(group), d3.max(group.bytes)]),
      values: null,
      shown: groups.length,
    }, "What is alive at the peak");
    return element;
  }

  /** A table of the largest arrays at the peak, where they are known; their types only where any is. */
  function arrayFigures({ peak: { arrays = [] } }) {
    if (arrays.length === 0) return null;
    const typed = arrays.some(({ type }) => type);
    const cells = (bytes, { type, op, source }) => [bytes, ...(typed ? [type] : []), op, source];
    const element = J.element("div", { class: "peak-arrays" }, J.element("h3", {}, "The largest arrays at the peak"));
    J.table(element, {
      columns: [right(`bytes${J.per}`), ...(typed ? [left("array")] : []), left("made by"), left("source line")],
      rows: arrays.map((array) => cells(J.size(array.bytes), array)),
      keys: arrays.map((array) => cells(array.bytes, array)),
      values: null,
      shown: arrays.length,
    }, "The largest arrays at the peak");
    return element;
  }

  /** A short stroke as the legend shows it for a line of the plot. */
  const stroke = (name) =>
    J.svg("svg", { viewBox: "0 0 20 20", "aria-hidden": "true" },
      J.svg("line", { class: name, x1: 0, x2: 20, y1: 10, y2: 10 }));

  /** One entry of the legend: its sign, its name, its bytes. */
  const entry = (sign, name, bytes, names) => J.legendEntry(sign, name, J.size(bytes), names);

  /**
   * The legend. Hover or focus brings a group forward, a press keeps it so.
   *
   * @param {(name: string|null) => void} highlight
   */
  function legend(section, groups, highlight) {
    let kept = null;
    const names = groups.map(({ name }) => name);
    const buttons = groups.map((group, index) => {
      const key = J.hue(groups, index);
      const bytes = group.bytes[section.peak.step];
      const sign = J.element("span", { class: "legend-key", "aria-hidden": "true",
        style: `background: ${J.palette[key]}; border-color: ${J.outlines[key]}` },
        J.element("span", {}, LETTERS[index % 9]));
      const press = () => {
        kept = kept === group.name ? null : group.name;
        buttons.forEach((other, place) => other.setAttribute("aria-pressed", String(groups[place].name === kept)));
        highlight(kept ?? group.name);
      };
      const show = () => highlight(group.name);
      const leave = () => highlight(kept);
      return J.element("button", { type: "button", class: "legend-entry", "aria-pressed": "false",
        "aria-label": `${group.name}, ${J.bytes(bytes)} at the peak`, onclick: press, onpointerenter: show,
        onfocus: show, onpointerleave: leave, onblur: leave }, entry(sign, group.name, bytes, names));
    });
    const still = (name, line) =>
      J.element("div", { class: "legend-entry" }, entry(stroke(name), line.name, line.bytes));
    const { ghost } = section;
    return [
      atPeak(section),
      J.element("ul", { class: "legend" },
        buttons.map((button) => J.element("li", {}, button)),
        ghost && J.element("li", {}, still("ghost", { name: `${ghost.name}, its peak`, bytes: ghost.peak.bytes })),
        section.lines.map((line) => J.element("li", {}, still("level", line)))),
    ];
  }

  // --------------------------------------------------------------------------------------------------- the view

  /** The switch between groupings, and the one that leaves out the ghost. */
  function controls({ groupings, ghost }, choose, haunt) {
    const name = J.id("grouping");
    const option = (grouping, index) => J.element("label", {},
      J.element("input", { type: "radio", name, checked: index === 0, onchange: () => choose(grouping) }),
      J.element("span", {}, grouping.name));
    return J.element("div", { class: "controls" },
      groupings.length > 1 && J.element("fieldset", { class: "choice" },
        J.element("legend", {}, "Stacked by"),
        J.element("div", { class: "choice-options" }, groupings.map(option))),
      ghost && J.element("label", { class: "tick-box" },
        J.element("input", { type: "checkbox", checked: true, onchange: (event) => haunt(event.target.checked) }),
        J.element("span", {}, `with ${ghost.name}`)));
  }

  /** The picture of one grouping, `width` pixels wide. */
  function picture(section, groups, frame) {
    const bands = stacked(groups);
    const line = (points) =>
      d3.line().curve(d3.curveStepAfter).x((point) => frame.x(point.x)).y((point) => frame.yOf(point.bytes))(points);
    const { nodes, taken } = labels(section, frame);
    const titles = { x: "operations in the order they run", y: `bytes alive${J.per} (${frame.unit.name})` };
    return J.svg("svg", { width: frame.width, height: frame.height, viewBox: `0 0 ${frame.width} ${frame.height}`,
      role: "img", "aria-label": summary(section) },
      J.axes(frame, titles, true), layers(groups, bands, frame), sides(section, frame),
      section.ghost && J.svg("path", { class: "ghost", d: line(stretched(section.ghost, section)) }),
      section.lines.map((each) => level(each, frame)),
      keys(groups, bands, frame, taken), nodes);
  }

  /** Draw the section; see the top of this file for what it reads. */
  J.sections.timeline = (element, section) => {
    if (section.steps.length === 0) {
      element.append(J.element("p", { class: "empty" }, "No operation runs here."));
      return;
    }
    const whole = { name: "everything", groups: [{ name: "all arrays", bytes: section.total }] };
    const shown = { groups: (section.groupings[0] ?? whole).groups, section };
    const [plot, below, table] = ["plot", null, null].map((name) => J.element("div", { class: name }));
    const hand = J.cursor(section, () => shown.groups);
    const draw = (width) => {
      const frame = frameOf(shown.section, width);
      hand.settle(frame);
      plot.querySelector("svg")?.remove();
      plot.prepend(picture(shown.section, shown.groups, frame));
    };
    const highlight = (name) => plot.querySelectorAll(".layer").forEach((layer) =>
      layer.classList.toggle("dimmed", name !== null && layer.dataset.group !== name));
    const write = () => {
      below.replaceChildren(...legend(shown.section, shown.groups, highlight));
      table.replaceChildren(...[groupFigures(section, shown.groups), arrayFigures(section)].filter(Boolean));
    };
    const change = (changed) => {
      Object.assign(shown, changed);
      write();
      redraw();
    };
    const choose = ({ groups }) => change({ groups });
    const haunt = (on) => change({ section: on ? section : { ...section, ghost: null } });
    plot.append(hand.node);
    element.append(J.element("div", {}, controls(section, choose, haunt), plot, below,
      section.note && J.element("p", { class: "note" }, section.note),
      J.element("details", {}, J.element("summary", {}, "The peak in figures"), table)));
    write();
    const redraw = J.fit(plot, draw);
  };
})();

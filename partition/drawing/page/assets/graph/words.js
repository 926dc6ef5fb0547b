/**
 * Say in words what a box of the graph holds and what a line through its cut carries: labels and tooltips.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  /** How many values a tooltip lists by name. */
  const LISTED = 6;

  /** A share of ops in words: `38 %`, or `all`. */
  const percent = (share) => (share === 1 ? "all" : `${Math.min(99, Math.max(1, Math.round(100 * share)))} %`);

  /** The steps of a loop: `× 6 steps`. */
  const steps = (box) => (box.loop && box.detail ? `× ${box.detail}` : "");

  /** The text beside a box's name: how many ops, how often, how many of them for the second time. */
  J.graphNote = (box) => {
    if (box.kind === "arguments") return "";
    if (box.kind === "op") return box.again ? "recomputed" : "";
    const again = box.again > 0 ? `${percent(box.again / box.ops)} recomputed` : "";
    return [steps(box), J.count(box.ops, "op"), again].filter(Boolean).join(" · ");
  };

  /** When a box runs, in words. */
  function when(box) {
    if (box.kind === "arguments") return "arguments that the backward reads again";
    if (box.side === "forward") return "runs in the forward";
    if (box.again === 0) return "runs in the backward";
    return box.again === box.ops
      ? "recomputed: runs a second time, in the backward"
      : `runs in the backward; ${J.count(box.again, "op")} of ${J.number(box.ops)} for the second time (recomputed)`;
  }

  /** Where a value comes from: the op that makes it, or the path of an argument. */
  const maker = ({ nodes, values }, value) =>
    (values.node[value] < 0 ? values.label[value] || "an argument" : nodes.name[values.node[value]]);

  /** How long a box takes: in the backward only recomputed ops have a price. */
  function time({ side, again, ops, seconds }) {
    const part = side === "backward" && again < ops ? " of it for the second time" : "";
    return seconds > 0 && `${J.seconds(seconds)}${part}, as predicted`;
  }

  /** Why a value is saved, as the plan says; "" where it says nothing. */
  const reason = ({ values, texts }, value) =>
    (values.reason[value] < 0 ? "" : `Why it is saved: ${texts[values.reason[value]]}`);

  /** The tooltip of one op. */
  function opTip(model, box, made) {
    const { section } = model;
    const { nodes, values, sources } = section;
    const given = section.arguments?.[box.node] ?? [];
    const reads = given.slice(0, 3).join(", ") + (given.length > 3 ? `, and ${given.length - 3} more` : "");
    const saved = box.side === "forward" ? made.filter((value) => values.saved[value]) : [];
    return J.tooltip.content(box.name, [
      when(box),
      [sources[nodes.source[box.node]], model.path(box).join(" / ")].filter(Boolean).join(", in "),
      time(box),
      given.length > 0 && `reads ${reads}`,
      saved.length > 0 && "saved for the backward",
      ...new Set(saved.map((value) => reason(section, value))),
    ], made.slice(0, LISTED).map((value) => ({ name: values.type[value], value: J.bytes(values.bytes[value]) })));
  }

  /**
   * The tooltip of a box.
   *
   * @param {Object} model
   * @param {Object} box
   * @param {(node: number) => Array<number>} valuesOf the values that an op makes
   * @returns {Array<Node>}
   */
  J.graphBoxTip = (model, box, valuesOf) => {
    if (box.kind === "op") return opTip(model, box, valuesOf(box.node));
    if (box.kind === "arguments") return J.tooltip.content("arguments", [when(box)]);
    return J.tooltip.content(box.name, [
      [steps(box), J.count(box.ops, "op")].filter(Boolean).join(", "),
      when(box),
      model.path(box).length > 0 && `in ${model.path(box).join(" / ")}`,
      time(box),
      model.isOpen(box) ? "Click or press Enter to close." : "Click or press Enter to open.",
    ]);
  };

  /** The words of a screen reader for a box. */
  J.graphBoxLabel = (model, box) => [box.name, J.graphNote(box), box.side,
    model.path(box).length > 0 && `in ${model.path(box).at(-1)}`].filter(Boolean).join(", ");

  /** The tooltip of a handle. */
  J.graphHandleTip = ({ section }, { values: held, bytes, to, others }) => {
    const { values, nodes, sources } = section;
    const [largest] = held;
    const readers = [to, ...others].filter(Boolean).map((box) => box.name);
    const read = readers.length > 0 && `read by ${[...new Set(readers)].slice(0, 3).join(", ")}`
      + (readers.length > 3 ? ` and ${readers.length - 3} more` : "");
    if (held.length > 1) {
      const rest = held.length - LISTED;
      return J.tooltip.content(`${J.count(held.length, "value")} saved, ${J.bytes(bytes)} in all`, [
        read,
        `The largest is made by ${maker(section, largest)}.`,
        reason(section, largest),
      ], [
        ...held.slice(0, LISTED).map((value) =>
          ({ name: `${values.type[value]} of ${maker(section, value)}`, value: J.size(values.bytes[value]) })),
        ...(rest > 0 ? [{ name: `and ${rest} more`, value: "" }] : []),
      ]);
    }
    const where = sources[values.source[largest]];
    return J.tooltip.content(`${J.bytes(bytes)} saved`, [
      `${values.type[largest]}, made by ${maker(section, largest)}${where ? ` at ${where}` : ""}`,
      read,
      reason(section, largest),
    ]);
  };

  /**
   * The picked values at the cut, in words: the largest value of a handle, why it is saved, and how many others are.
   *
   * @returns {string}
   */
  J.graphPicked = ({ values, nodes, sources, texts }, held) => {
    const [value] = held;
    const where = sources[values.source[value]];
    const why = reason({ values, texts }, value);
    return [
      `${J.bytes(values.bytes[value])}, ${values.type[value]}, made by ${maker({ nodes, values }, value)}`,
      `${where ? ` at ${where}` : ""}.`,
      why && ` ${why}.`,
      held.length > 1 && ` It is the largest of ${held.length} on this line.`,
    ].filter(Boolean).join("");
  };

  /** The words of a screen reader for a handle. */
  J.graphHandleLabel = (section, { values: held, bytes, from, to }) => {
    const what = held.length === 1 ? section.values.type[held[0]] : J.count(held.length, "value");
    const ends = `from ${from.name} to ${to ? to.name : "the caller"}`;
    return `Saved: ${what}, ${J.bytes(bytes)}, ${ends}. ${reason(section, held[0])}`.trim();
  };

  /** The graph in one sentence. */
  J.graphSummary = (model) => {
    const { forward, backward } = model.roots;
    const { bytes } = model.section.values;
    const saved = model.crossings.filter((crossing) => crossing.saved);
    const total = saved.reduce((sum, { value }) => sum + bytes[value], 0);
    const cut = `, of which ${J.number(backward.again)} are recomputed; ${J.count(saved.length, "value")}, `
      + `${J.bytes(total)}, saved between them`;
    return {
      cut: model.section.cut,
      note: model.section.cut ? `${J.bytes(total)} saved` : "",
      text: `Graph of ${J.count(forward.ops, "op")} in the forward and ${J.number(backward.ops)} in the backward`
        + `${model.section.cut ? cut : ", not yet cut"}. `
        + "Arrow keys move, Page Up and Page Down follow the order of the run, Enter opens.",
    };
  };
})();

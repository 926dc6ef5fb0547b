/**
 * Follow the steps of a timeline by pointer and keyboard, and tell which arrays are alive there.
 *
 * The cursor is a slider that lies over the plot: a screen reader says its step and bytes, arrow keys move it by one,
 * page keys by a twentieth, Home and End to the ends, and p to the peak.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  /** The place of a group in `J.palette`; the remaining bytes are grey, whatever their place. */
  J.hue = (groups, index) => (groups[index].name === "everything else" ? 8 : index % 9);

  /** A step in words: `dot_general, gpt.py:122 (attention)`. */
  J.where = (step) => [step.op, step.source].filter(Boolean).join(", ");

  /** The tooltip of a step: the op and its place, all bytes, and the bytes of each group, the largest first. */
  function told(section, groups, index) {
    const step = section.steps[index];
    const side = index < section.boundary ? "forward" : "backward";
    const count = `operation ${J.number(index + 1)} of ${J.number(section.steps.length)}, ${side}`;
    const rows = groups
      .map((group, place) => ({ name: group.name, bytes: group.bytes[index], fill: J.palette[J.hue(groups, place)] }))
      .filter((row) => row.bytes > 0)
      .sort((a, b) => b.bytes - a.bytes);
    return J.tooltip.content(step.op, [step.source, step.scope, step.loop, count], [
      { name: "alive in all", value: J.bytes(section.total[index]), strong: true },
      ...rows.map((row) => ({ ...row, value: J.size(row.bytes) })),
    ]);
  }

  /** Where a key leads from a step, or null if the key means nothing here. */
  function target(event, at, section) {
    const last = section.steps.length - 1;
    const stride = Math.max(1, Math.round(last / 20));
    const leads = { ArrowLeft: at - 1, ArrowRight: at + 1, ArrowDown: at - 1, ArrowUp: at + 1, PageDown: at - stride,
      PageUp: at + stride, Home: 0, End: last, p: section.peak.step };
    if (event.ctrlKey || event.altKey || event.metaKey || !(event.key in leads)) return null;
    return Math.max(0, Math.min(leads[event.key], last));
  }

  /** The cursor's element and the line in it. */
  function slider(count) {
    const line = J.element("div", { class: "cursor-line", hidden: true });
    const node = J.element("div", { class: "cursor", role: "slider", tabindex: "0", "aria-valuemin": "1",
      "aria-valuemax": String(count), "aria-label": "Operation; p goes to the peak" }, line);
    return { node, line };
  }

  /**
   * Make the cursor of a timeline.
   *
   * @param {Object} section of kind `timeline`
   * @param {() => Array<{name: string, bytes: Array<number>}>} groups the groups that are shown at present
   * @returns {{node: HTMLElement, settle: (frame: Object) => void}} `settle` is told the picture's sizes and scales
   */
  J.cursor = (section, groups) => {
    const { node, line } = slider(section.steps.length);
    let frame = null;
    let at = section.peak.step;
    const say = () => {
      node.setAttribute("aria-valuenow", String(at + 1));
      node.setAttribute("aria-valuetext", `${J.where(section.steps[at])}: ${J.bytes(section.total[at])} alive`);
    };
    const show = (step, height) => {
      at = step;
      say();
      const box = node.getBoundingClientRect();
      const left = frame.x(at + 0.5) - frame.plot.x;
      line.style.left = `${left}px`;
      line.hidden = false;
      const y = height ?? frame.yOf(section.total[at]) - frame.plot.y;
      J.tooltip.show(node, told(section, groups(), at), { x: box.x + left, y: box.y + y });
    };
    const hide = () => {
      line.hidden = true;
      J.tooltip.hide();
    };
    const point = (event) => {
      const box = node.getBoundingClientRect();
      const step = Math.floor(frame.x.invert(frame.plot.x + event.clientX - box.x));
      show(Math.max(0, Math.min(step, section.steps.length - 1)), event.clientY - box.y);
    };
    const steer = (event) => {
      if (event.key === "Escape") hide();
      const step = target(event, at, section);
      if (step === null) return;
      event.preventDefault();
      show(step);
    };
    const listen = { pointermove: point, pointerdown: point, pointerleave: hide, blur: hide, keydown: steer,
      focus: () => node.matches(":focus-visible") && show(at) };
    for (const [name, listener] of Object.entries(listen)) node.addEventListener(name, listener);
    say();
    const settle = (sizes) => {
      frame = sizes;
      const { x, y, width, height } = frame.plot;
      Object.assign(node.style, { left: `${x}px`, top: `${y}px`, width: `${width}px`, height: `${height}px` });
    };
    return { node, settle };
  };
})();

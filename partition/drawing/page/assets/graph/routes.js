/**
 * Give every edge within a side, and every curve through the cut, its path.
 *
 * An edge between boxes that dagre placed follows dagre's bends. One that passes many rows, between boxes that others
 * tie anyway, takes the lane at the outer side of the frame that holds both, where all such edges run together.
 */
"use strict";

(function () {
  const J = (globalThis.jointcut ??= {});

  const SIZE = J.graphSize;
  /** Least room between two handles on the cut, and how far beyond it a curve ends that nothing reads. */
  const HANDLE = 20;
  const REACH = 72;

  /** A smooth path through points, upright at each. */
  const upright = (points) => {
    const { line, curveBumpY } = globalThis.jointcutVendor.d3;
    return line(({ x }) => x, ({ y }) => y).curve(curveBumpY)(points);
  };

  /** A curve between two points, level at both. */
  const across = (a, b) => `M${a.x} ${a.y}C${(a.x + b.x) / 2} ${a.y} ${(a.x + b.x) / 2} ${b.y} ${b.x} ${b.y}`;

  /** The points where two boxes that stand beside one another face each other. */
  function facing(a, b) {
    const [start, end] = [a.y + a.h / 2, b.y + b.h / 2];
    return a.x < b.x
      ? [{ x: a.x + a.w, y: start }, { x: b.x, y: end }]
      : [{ x: a.x, y: start }, { x: b.x + b.w, y: end }];
  }

  /** Bends of an edge by the lane of a frame: out of the row where it starts, and into the one where it ends. */
  function lane(frame, start, end, down) {
    const x = frame.box.side === "forward" ? frame.x + SIZE.pad / 2 : frame.x + frame.w - SIZE.pad / 2;
    const [below, above] = [({ y, h }) => y + h + SIZE.row / 2, ({ y }) => y - SIZE.row / 2];
    return [{ x, y: down ? below(start) : above(start) }, { x, y: down ? above(end) : below(end) }];
  }

  /** Bends of an edge where dagre led it; none lies outside of the frame. */
  function bent(frame, route, down) {
    const [least, most] = [SIZE.pad / 2, frame.w - SIZE.pad / 2];
    return route.flatMap(({ x, beside, above: rank }) => {
      const at = frame.x + Math.max(least, Math.min(most, x));
      if (beside) {
        const [first, last] = [beside.rows[0], beside.rows.at(-1)];
        const ends = [first.middle - first.tall / 2, last.middle + last.tall / 2];
        return (down ? ends : ends.reverse()).map((y) => ({ x: at, y: frame.y + y }));
      }
      if (!rank || frame.ranks.at(-1) === rank) return [];
      const next = frame.ranks[frame.ranks.indexOf(rank) + 1].rows[0];
      const last = rank.rows.at(-1);
      return [{ x: at, y: frame.y + (last.middle + last.tall / 2 + next.middle - next.tall / 2) / 2 }];
    });
  }

  /** The path of an edge between two visible boxes of one side: upright, or level between boxes of one height. */
  J.graphRoute = (edge, placed, roots) => {
    const [a, b] = [placed.get(edge.from), placed.get(edge.to)];
    const above = J.graphCommon(edge.from, edge.to);
    const frame = above.parent ? placed.get(above) : roots[above.side];
    const [start, end] = [J.graphUnder(edge.from, above), J.graphUnder(edge.to, above)];
    const down = a.y + a.h <= b.y;
    if (!down && b.y + b.h > a.y) return across(...facing(a, b));
    const known = frame.routes.get(`${start.id} ${end.id}`);
    const bends = known === null
      ? lane(frame, placed.get(start), placed.get(end), down)
      : bent(frame, known ?? [], down);
    return upright([{ x: a.x + a.w / 2, y: down ? a.y + a.h : a.y }, ...bends,
      { x: b.x + b.w / 2, y: down ? b.y : b.y + b.h }]);
  };

  /** Move heights apart until each is a handle's height from the next, as near to the wished ones as that allows. */
  function spread(wished) {
    const groups = [];
    for (const wish of wished) {
      groups.push({ sum: wish, count: 1 });
      const start = ({ sum, count }) => sum / count - ((count - 1) * HANDLE) / 2;
      while (groups.length > 1) {
        const [before, last] = groups.slice(-2);
        if (start(before) + before.count * HANDLE <= start(last)) break;
        groups.splice(-2, 2, { sum: before.sum + last.sum, count: before.count + last.count });
      }
    }
    return groups.flatMap(({ sum, count }) =>
      Array.from({ length: count }, (_, index) => sum / count + (index - (count - 1) / 2) * HANDLE));
  }

  /** Where curves leave and enter: the middles of the inner edges of the boxes. */
  const gate = (node) =>
    ({ x: node.box.side === "forward" ? node.x + node.w : node.x, y: node.y + node.h / 2 });

  /** Move the ends of curves apart that leave or enter a box at one point, in the order of their handles. */
  function fan(made) {
    const ends = new Map();
    for (const { start, end, y } of made) {
      for (const point of [start, end]) {
        const key = `${point.x} ${point.y}`;
        ends.set(key, [...(ends.get(key) ?? []), { point, y }]);
      }
    }
    for (const group of ends.values()) {
      group.sort((a, b) => a.y - b.y);
      const apart = Math.min(9, (SIZE.box - 8) / group.length);
      group.forEach(({ point }, index) => (point.y += (index - (group.length - 1) / 2) * apart));
    }
  }

  /** The curves through the cut with their paths; saved ones have a handle at x = 0. */
  J.graphCurves = (handles, placed) => {
    const made = handles.map((handle) => {
      const start = gate(placed.get(handle.from));
      const end = handle.to ? gate(placed.get(handle.to)) : { x: REACH, y: start.y };
      return { ...handle, start, end, y: (start.y + end.y) / 2 };
    });
    const held = made.filter(({ saved }) => saved).sort((a, b) => a.y - b.y || a.start.y - b.start.y);
    spread(held.map(({ y }) => y)).forEach((y, index) => (held[index].y = y));
    fan(made);
    return made.map((handle) => {
      const middle = { x: 0, y: handle.y };
      const path = across(handle.start, middle) + across(middle, handle.end);
      const branches = handle.others.map((box) => across(middle, gate(placed.get(box))));
      return { ...handle, path, branches };
    });
  };
})();

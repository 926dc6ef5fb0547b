/** The parts of d3 and dagre that the page's own scripts use; build.js makes ../vendor.js of this file. */

import { Graph, layout } from "@dagrejs/dagre";
import * as array from "d3-array";
import * as axis from "d3-axis";
import * as format from "d3-format";
import { scaleBand, scaleLinear, scaleLog, scaleOrdinal, scalePoint, scaleSqrt, scaleSymlog } from "d3-scale";
import * as selection from "d3-selection";
import { area, line, linkHorizontal, linkVertical, stack, symbol } from "d3-shape";
import { curveBasis, curveBumpX, curveBumpY, curveLinear, curveMonotoneX, curveMonotoneY } from "d3-shape";
import { curveStep, curveStepAfter, curveStepBefore } from "d3-shape";
import { stackOffsetNone, stackOrderNone, stackOrderReverse } from "d3-shape";
import { symbolCircle, symbolCross, symbolDiamond, symbolPlus, symbolSquare, symbolStar, symbolTimes } from "d3-shape";
import { symbolTriangle, symbolTriangle2, symbolWye, symbolsFill, symbolsStroke } from "d3-shape";
import * as zoom from "d3-zoom";

const scale = { scaleBand, scaleLinear, scaleLog, scaleOrdinal, scalePoint, scaleSqrt, scaleSymlog };
const shape = {
  ...{ area, line, linkHorizontal, linkVertical, stack, symbol },
  ...{ curveBasis, curveBumpX, curveBumpY, curveLinear, curveMonotoneX, curveMonotoneY },
  ...{ curveStep, curveStepAfter, curveStepBefore, stackOffsetNone, stackOrderNone, stackOrderReverse },
  ...{ symbolCircle, symbolCross, symbolDiamond, symbolPlus, symbolSquare, symbolStar, symbolTimes },
  ...{ symbolTriangle, symbolTriangle2, symbolWye, symbolsFill, symbolsStroke },
};

globalThis.jointcutVendor = {
  d3: { ...array, ...axis, ...format, ...scale, ...selection, ...shape, ...zoom },
  dagre: { Graph, layout },
};

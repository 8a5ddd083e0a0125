// Checks objects against the types that their projects publish. Reads {route, dashboards} from the input; prints what
// is wrong as {route: [...], dashboards: {name: [...]}}. The compiler finds unknown fields and wrong types, the route's
// own validator also patterns and values.

import { readFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { HTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
import ts from "typescript";

const HERE = dirname(fileURLToPath(import.meta.url));
const PANELS = { barchart: "BarChart", bargauge: "BarGauge", heatmap: "Heatmap", stat: "Stat", timeseries: "TimeSeries" };
const SCHEMA = "@grafana/schema/dist/esm/raw";
// JSON has the values of an enum, not its names.
const PLAIN = `
type Plain<T> = T extends string ? \`\${T}\`
  : T extends number | boolean | null | undefined ? T
  : T extends (infer U)[] ? Plain<U>[]
  : T extends object ? { [K in keyof T]: Plain<T[K]> } : T;
`;

// What the compiler says of a program of one file.
function complaints(text) {
  const name = join(HERE, "generated.ts");
  const options = {
    noEmit: true,
    strict: true,
    skipLibCheck: true,
    target: ts.ScriptTarget.ES2022,
    module: ts.ModuleKind.NodeNext,
    moduleResolution: ts.ModuleResolutionKind.NodeNext,
  };
  const host = ts.createCompilerHost(options);
  const { fileExists, readFile } = host;
  host.fileExists = (path) => path === name || fileExists(path);
  host.readFile = (path) => (path === name ? text : readFile(path));
  const program = ts.createProgram([name], options, host);
  return ts.getPreEmitDiagnostics(program).map((one) => ts.flattenDiagnosticMessageText(one.messageText, " "));
}

function routeComplaints(route) {
  const found = complaints(`
    import type { IHTTPRoute } from "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1";
    export const route: IHTTPRoute = ${JSON.stringify(route)};`);
  try {
    new HTTPRoute(route).validate();
  } catch (error) {
    found.push(error.message);
  }
  return found;
}

function dashboardComplaints(dashboard) {
  const lines = [`import type { Dashboard } from "${SCHEMA}/dashboard/x/Dashboard_types.gen";`, PLAIN];
  for (const [kind, name] of Object.entries(PANELS)) {
    lines.push(`import type * as ${kind} from "${SCHEMA}/composable/${kind}/panelcfg/x/${name}PanelCfg_types.gen";`);
  }
  lines.push(`export const dashboard: Plain<Dashboard> = ${JSON.stringify(dashboard)};`);
  for (const { id, type, options, fieldConfig } of dashboard.panels.filter((panel) => panel.type !== "row")) {
    lines.push(`export const options${id}: Plain<Partial<${type}.Options>> = ${JSON.stringify(options)};`);
    const { custom } = fieldConfig.defaults;
    if (custom) lines.push(`export const custom${id}: Plain<Partial<${type}.FieldConfig>> = ${JSON.stringify(custom)};`);
  }
  return complaints(lines.join("\n"));
}

const { route, dashboards } = JSON.parse(readFileSync(0, "utf-8"));
const found = Object.fromEntries(Object.entries(dashboards).map(([name, one]) => [name, dashboardComplaints(one)]));
console.log(JSON.stringify({ route: routeComplaints(route), dashboards: found }));

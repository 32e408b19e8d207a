// Prints what Grafana's panel plugins merge into a panel's options and custom field config, by the panel's type:
//   node tests/dashboards/grafana_schema/defaults.mjs .tools/grafana_schema >tests/dashboards/grafana_schema/defaults.json
// Node 20.19 or newer: the package's modules end in .js or in .mjs, as its version has it.
import { readdirSync } from 'node:fs';
import { join, resolve } from 'node:path';
import { pathToFileURL } from 'node:url';

const plugins = resolve(process.argv[2], 'node_modules/@grafana/schema/dist/esm/raw/composable');

// Only these types differ from their folder's name.
const TYPES = { statetimeline: 'state-timeline', statushistory: 'status-history' };
const PANELS = ['bargauge', 'gauge', 'heatmap', 'stat', 'statetimeline', 'statushistory', 'table', 'timeseries'];

const found = {};
for (const plugin of PANELS) {
  const folder = join(plugins, plugin, 'panelcfg', 'x');
  const file = readdirSync(folder).find((name) => /_types\.gen\.m?js$/.test(name));
  const { defaultOptions = {}, defaultFieldConfig = {} } = await import(pathToFileURL(join(folder, file)).href);
  found[TYPES[plugin] ?? plugin] = { custom: defaultFieldConfig, options: defaultOptions };
}

function sorted(value) {
  if (value === null || typeof value !== 'object' || Array.isArray(value)) return value;
  return Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]));
}

process.stdout.write(`${JSON.stringify(sorted(found), null, 2)}\n`);

// Grafana's published types of a dashboard, made narrow: where they allow any key, these name the keys that there are.

import type { DataSourceRef } from '@grafana/schema';
import type * as raw from '@grafana/schema/dist/esm/raw/dashboard/x/dashboard_types.gen.d.ts';
import type * as bargauge from '@grafana/schema/dist/esm/raw/composable/bargauge/panelcfg/x/BarGaugePanelCfg_types.gen.d.ts';
import type * as gauge from '@grafana/schema/dist/esm/raw/composable/gauge/panelcfg/x/GaugePanelCfg_types.gen.d.ts';
import type * as heatmap from '@grafana/schema/dist/esm/raw/composable/heatmap/panelcfg/x/HeatmapPanelCfg_types.gen.d.ts';
import type * as stat from '@grafana/schema/dist/esm/raw/composable/stat/panelcfg/x/StatPanelCfg_types.gen.d.ts';
import type * as timeline from '@grafana/schema/dist/esm/raw/composable/statetimeline/panelcfg/x/StateTimelinePanelCfg_types.gen.d.ts';
import type * as history from '@grafana/schema/dist/esm/raw/composable/statushistory/panelcfg/x/StatusHistoryPanelCfg_types.gen.d.ts';
import type * as table from '@grafana/schema/dist/esm/raw/composable/table/panelcfg/x/TablePanelCfg_types.gen.d.ts';
import type * as text from '@grafana/schema/dist/esm/raw/composable/text/panelcfg/x/TextPanelCfg_types.gen.d.ts';
import type * as timeseries from '@grafana/schema/dist/esm/raw/composable/timeseries/panelcfg/x/TimeSeriesPanelCfg_types.gen.d.ts';
// Grafana 10 was the last whose published types had the query of Prometheus.
import type * as prometheus from '@grafana/schema-10/dist/esm/raw/composable/prometheus/dataquery/x/PrometheusDataQuery_types.gen.d.ts';

// Of the second schema, which is as narrow as these but for the options of panels.
import type { Spec } from '@grafana/schema-13/apis/dashboard.grafana.app/v2beta1';

export interface Resource {
  apiVersion: 'dashboard.grafana.app/v2beta1';
  kind: 'Dashboard';
  metadata: { name: string };
  spec: Spec;
}

// A type as it stands in JSON: an enum of texts is its texts.
type Json<T> = T extends string ? `${T}`
  : T extends number | boolean | null | undefined ? T
  : T extends readonly (infer Item)[] ? Json<Item>[]
  : T extends object ? { [Key in keyof T]: Json<T[Key]> }
  : T;

// `interval` is not in that type, and is in Grafana's editor of queries as "Min step".
interface Query extends Omit<Json<prometheus.PrometheusDataQuery>, 'datasource' | 'scope'> {
  datasource?: DataSourceRef;
  interval?: string;
}

interface DataLink {
  title: string;
  url: string;
  targetBlank?: boolean;
  oneClick?: boolean;
}

interface Settings extends Omit<Json<raw.FieldConfig>, 'custom' | 'links'> {
  links?: DataLink[];
}

interface Fields<Custom> extends Settings {
  custom?: Json<Custom>;
}

// One setting of an override: the same as among the defaults, by its name, and `custom.NAME` for those of the kind of panel.
type Values<T> = { [Key in keyof T]-?: { id: Key; value: T[Key] } }[keyof T];
type CustomValues<T> = { [Key in keyof T & string]-?: { id: `custom.${Key}`; value: T[Key] } }[keyof T & string];

type Matcher =
  | { id: 'byName' | 'byRegexp' | 'byType' | 'byFrameRefID'; options: string }
  | { id: 'byNames'; options: { mode: 'include' | 'exclude'; names: string[]; prefix?: string; readOnly?: boolean } };

interface Override<Custom> {
  matcher: Matcher;
  properties: (Values<Required<Settings>> | CustomValues<Required<Json<Custom>>>)[];
}

interface Nothing {
  nothing?: never;
}

// The transformations that the dashboards use; Grafana publishes no types of their options.
interface Transformations {
  organize: {
    excludeByName?: Record<string, boolean>;
    includeByName?: Record<string, boolean>;
    indexByName?: Record<string, number>;
    renameByName?: Record<string, string>;
  };
  merge: Nothing;
  seriesToRows: Nothing;
  sortBy: { sort: { field: string; desc?: boolean }[] };
  limit: { limitField: number | string };
  joinByField: { byField?: string; mode?: 'inner' | 'outer' | 'outerTabular' };
  labelsToFields: { mode?: 'columns' | 'rows'; keepLabels?: string[]; valueLabel?: string };
  renameByRegex: { regex: string; renamePattern: string };
  filterFieldsByName: { include?: { names?: string[]; pattern?: string }; exclude?: { names?: string[]; pattern?: string } };
}
type Transformation = {
  [Id in keyof Transformations]: Omit<Json<raw.DataTransformerConfig>, 'id' | 'options' | 'filter'> & { id: Id; options: Transformations[Id] };
}[keyof Transformations];

interface Described extends Omit<Json<raw.Panel>, 'type' | 'options' | 'fieldConfig' | 'targets' | 'transformations'> {
  id: number;
  title: string;
  gridPos: Json<raw.GridPos>;
}

interface Panel<Type extends string, Options, Custom> extends Described {
  type: Type;
  options: Json<Options>;
  fieldConfig: { defaults: Fields<Custom>; overrides: Override<Custom>[] };
  targets: Query[];
  transformations?: Transformation[];
}

interface Text extends Described {
  type: 'text';
  options: Json<text.Options>;
}

// Of a collapsed row the panels are checked by themselves, as those outside.
interface Row extends Omit<Json<raw.RowPanel>, 'panels'> {
  gridPos: Json<raw.GridPos>;
  panels: [];
}

export interface Panels {
  bargauge: Panel<'bargauge', bargauge.Options, Nothing>;
  gauge: Panel<'gauge', gauge.Options, Nothing>;
  heatmap: Panel<'heatmap', heatmap.Options, heatmap.FieldConfig>;
  row: Row;
  stat: Panel<'stat', stat.Options, Nothing>;
  'state-timeline': Panel<'state-timeline', timeline.Options, timeline.FieldConfig>;
  'status-history': Panel<'status-history', history.Options, history.FieldConfig>;
  table: Panel<'table', table.Options, table.FieldConfig>;
  text: Text;
  timeseries: Panel<'timeseries', timeseries.Options, timeseries.FieldConfig>;
}

interface Variable<Type extends raw.VariableType, Asked> extends Omit<Json<raw.VariableModel>, 'type' | 'query' | 'datasource'> {
  type: Type;
  query: Asked;
}

interface Asking extends Variable<'query', string | { query: string; refId: string; qryType?: number }> {
  datasource: DataSourceRef;
  definition?: string;
}

interface Interval extends Variable<'interval', string> {
  auto?: boolean;
  auto_count?: number;
  auto_min?: string;
}

export interface Variables {
  datasource: Variable<'datasource', string>;
  query: Asking;
  custom: Variable<'custom', string>;
  interval: Interval;
  textbox: Variable<'textbox', string>;
  constant: Variable<'constant', string>;
}

interface Annotated extends Omit<Json<raw.AnnotationQuery>, 'target' | 'builtIn'> {
  datasource: DataSourceRef;
}

// The data source's own keys, published nowhere. Its query stands beside them: Grafana 11 does not look for it in `target`.
interface PrometheusAnnotation extends Annotated {
  builtIn?: 0;
  expr: string;
  step?: string;
  titleFormat?: string;
  textFormat?: string;
  tagKeys?: string;
  useValueForTime?: boolean;
}

// One of the data source "-- Grafana --".
interface BuiltInAnnotation extends Annotated {
  builtIn: 1;
  target?: Json<raw.AnnotationTarget>;
}

export interface Annotations {
  builtIn: BuiltInAnnotation;
  prometheus: PrometheusAnnotation;
}

// All that is not checked piece by piece.
export interface Dashboard extends Omit<Json<raw.Dashboard>, 'panels' | 'templating' | 'annotations' | 'snapshot'> {
  uid: string;
  title: string;
  schemaVersion: 39 | 40 | 41;
  panels: [];
  templating: { list: [] };
  annotations: { list: [] };
}

{{/* What the container runs. All values go into an argument list; no shell ever interprets them. */}}

{{- define "training.runName" -}}
{{- .Values.runName | default .Release.Name -}}
{{- end -}}

{{/* A path relative to the mount, unless it is absolute. */}}
{{- define "training.path" -}}
{{- if hasPrefix "/" .path -}}{{ .path }}{{- else -}}{{ printf "%s/%s" (trimSuffix "/" .mount) .path }}{{- end -}}
{{- end -}}

{{/* Prints whole numbers as integers: Helm reads numbers in a values file as floats and would print 1e+06. */}}
{{- define "training.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}

{{- define "training.nodes" -}}
{{- if .Values.training.minNodes -}}{{ printf "%d:%d" (int .Values.training.minNodes) (int .Values.training.nodes) }}
{{- else -}}{{ int .Values.training.nodes }}{{- end -}}
{{- end -}}

{{/* The recipe that model.config names; empty if there is none or `config` replaces it. */}}
{{- define "training.recipe" -}}
{{- if and (not .Values.config) .Values.model.config -}}{{ .Files.Get (printf "recipes/%s.yaml" .Values.model.config) }}{{- end -}}
{{- end -}}

{{/* Fails for a model that is neither a recipe of this chart nor a preset. The list has the presets without a recipe. */}}
{{- define "training.checkModel" -}}
{{- $known := list "deepseek-v2-lite" "deepseek-v3" "gpt-oss-20b" "gpt3-1.3b" "gpt3-125m" "gpt3-13b" "gpt3-175b" "gpt3-30b" "gpt3-375m" "gpt3-857m" "llama-405b" "mixtral-8x7b" "mpt-small-cpu" "mpt-tiny" "olmoe-1b-7b" "qwen3-30b-a3b" -}}
{{- range $path, $_ := .Files.Glob "recipes/*.yaml" }}{{ $known = append $known (trimSuffix ".yaml" (base $path)) }}{{ end -}}
{{- if and .Values.model.config (not (has .Values.model.config $known)) -}}
{{- fail (printf "model.config is %s, which is neither a preset nor a recipe; known are %s" .Values.model.config (join ", " (sortAlpha $known))) -}}
{{- end -}}
{{- end -}}

{{/* "true" if the values or the configuration name a data set. `demo` is the default of every recipe, so there it names none. */}}
{{- define "training.namesData" -}}
{{- $named := ne .Values.storage.datasetPath "" -}}
{{- range concat .Values.overrides (keys .Values.yamlUpdates) -}}
{{- if regexMatch "^(data|data\\.path|data\\.blend(\\..*)?|variables\\.data|variables\\.data_remote)(=|$)" . }}{{ $named = true }}{{ end -}}
{{- end -}}
{{- $recipe := include "training.recipe" . -}}
{{- range $key, $value := .Values.config | default $recipe | default "{}" | fromYaml -}}
{{- if has $key (list "data.path" "data.blend" "Error") }}{{ $named = true }}{{ end -}}
{{- if eq $key "data" -}}
{{- if kindIs "map" $value }}{{ $named = or $named (hasKey $value "path") (hasKey $value "blend") }}{{ else }}{{ $named = or $named (not $recipe) (ne (toString $value) "${variables.data}") }}{{ end -}}
{{- end -}}
{{- end -}}
{{- $named -}}
{{- end -}}

{{/* The data set where nothing names one: what the data charts write by default. Never the demo's text. As JSON. */}}
{{- define "training.defaultDatasets" -}}
{{- if .Values.model.size -}}
{{- toJson (dict "data.path" "slimpajama/preprocessed") -}}
{{- else if and (not .Values.config) (or (not .Values.model.config) (hasPrefix "mpt-" .Values.model.config)) -}}
{{- toJson (dict "data.path" "my-copy-c4/train" "data.valid_path" "my-copy-c4/val") -}}
{{- else -}}
{{- fail "the run names no data set: set storage.datasetPath to a folder on the volume, for example my-copy-c4/train; --set 'overrides={data=demo}' is for a first try" -}}
{{- end -}}
{{- end -}}

{{/* Overrides derived from the values, as a JSON list. */}}
{{- define "training.overrides" -}}
{{- $v := .Values -}}
{{- include "training.checkModel" . -}}
{{- $words := list (printf "name=%s" (include "training.runName" .)) -}}
{{- $words = append $words (printf "runs_dir=%s" (include "training.path" (dict "path" $v.storage.logsPath "mount" $v.storage.mountPath))) -}}
{{- /* A recipe sets its own model; not every recipe has a preset's name. */ -}}
{{- if and $v.model.config (not (include "training.recipe" .)) }}{{ $words = append $words (printf "model=%s" $v.model.config) }}{{ end -}}
{{- if eq $v.model.size "custom" -}}
  {{- /* A custom shape with the other fields (positions, biases, vocabulary) of the GPT-3 family. */ -}}
  {{- $words = append $words "model=gpt3-125m" -}}
  {{- $keys := dict "numLayers" "model.layers" "hiddenSize" "model.hidden" "numAttentionHeads" "model.heads" "seqLength" "model.seq_len" "tensorModelParallelSize" "parallel.tensor" "pipelineModelParallelSize" "parallel.pipeline" -}}
  {{- range $name, $key := $keys -}}
    {{- $value := index $v.model.custom $name -}}
    {{- if not (kindIs "invalid" $value) }}{{ $words = append $words (printf "%s=%d" $key (int64 $value)) }}{{ end -}}
  {{- end -}}
  {{- with $v.model.custom.seqLength }}{{ $words = append $words (printf "model.max_positions=%d" (int64 .)) }}{{ end -}}
{{- else if $v.model.size -}}
  {{- /* The published tensor and pipeline degrees of these models. */ -}}
  {{- $degrees := dict "175b" (list 8 16) "30b" (list 4 8) "13b" (list 2 4) "1.3b" (list 1 2) "857m" (list 1 1) "375m" (list 1 1) "125m" (list 1 1) -}}
  {{- $degree := index $degrees $v.model.size -}}
  {{- $words = concat $words (list (printf "model=gpt3-%s" $v.model.size) (printf "parallel.tensor=%d" (index $degree 0 | int64)) (printf "parallel.pipeline=%d" (index $degree 1 | int64))) -}}
{{- end -}}
{{- if $v.model.size -}}
  {{- /* Megatron's training defaults for these models; the values and overrides below take priority. */ -}}
  {{- $words = concat $words (list "microbatch=1" "optimizer.lr=6e-5" "optimizer.weight_decay=0.1" "schedule.name=cosine" "schedule.final=0.1" "optimizer.clip=1.0") -}}
  {{- with $v.training.iterations }}{{ $words = append $words (printf "schedule.warmup=%dba" (max 1 (div (int64 .) 1000))) }}{{ end -}}
{{- end -}}
{{- with $v.training.iterations }}{{ $words = append $words (printf "max_duration=%dba" (int64 .)) }}{{ end -}}
{{- with $v.training.globalBatchSize }}{{ $words = append $words (printf "global_batch=%d" (int64 .)) }}{{ end -}}
{{- with $v.training.microBatchSize }}{{ $words = append $words (printf "microbatch=%d" (int64 .)) }}{{ end -}}
{{- with $v.training.saveInterval }}{{ $words = append $words (printf "checkpoint.interval=%dba" (int64 .)) }}{{ end -}}
{{- with $v.training.evalInterval }}{{ $words = append $words (printf "evaluate.interval=%dba" (int64 .)) }}{{ end -}}
{{- $datasets := dict "data.path" $v.storage.datasetPath -}}
{{- if ne (include "training.namesData" .) "true" }}{{ $datasets = include "training.defaultDatasets" . | fromJson }}{{ end -}}
{{- range $key, $path := $datasets -}}
{{- if $path }}{{ $words = append $words (printf "%s=%s" $key (include "training.path" (dict "path" $path "mount" $v.storage.mountPath))) }}{{ end -}}
{{- end -}}
{{- if ne $v.localDisk.kind "none" }}{{ $words = append $words (printf "data.cache_dir=%s/keepstep-data" (trimSuffix "/" $v.localDisk.mountPath)) }}{{ end -}}
{{- with $v.storage.checkpointPath }}{{ $words = append $words (printf "checkpoint.folder=%s" (include "training.path" (dict "path" . "mount" $v.storage.mountPath))) }}{{ end -}}
{{- if $v.metrics.scrape }}{{ $words = concat $words (list (printf "observe.metrics_port=%d" (int $v.metrics.port)) "observe.metrics_host=0.0.0.0") }}{{ end -}}
{{- $words = concat $words $v.overrides -}}
{{- toJson $words -}}
{{- end -}}

{{/* The argument list, as JSON. The kubelet expands $(NAME) and reads $$ as a dollar sign, so double each dollar. */}}
{{- define "training.args" -}}
{{- $v := .Values -}}
{{- $words := list "--nodes" (include "training.nodes" .) "--processes" (printf "%d" (int $v.training.gpusPerNode | max 1)) "--max-restarts" (printf "%d" (int $v.training.maxRestarts)) -}}
{{- if eq $v.jobKind "volcano" }}{{ $words = append $words "--again" }}{{ end -}}
{{- if eq $v.jobKind "leaderworkerset" }}{{ $words = concat $words (list "--hold" (printf "%d" (int $v.training.backoffLimit))) }}{{ end -}}
{{- range $key, $value := $v.yamlUpdates }}{{ $words = concat $words (list "--foundry-update" (printf "%s=%s" $key (include "training.scalar" $value))) }}{{ end -}}
{{- if $v.instead -}}
{{- $words = concat $words (list "--") $v.instead -}}
{{- else -}}
{{- $words = concat $words (list "--" "train" "/etc/keepstep/run.yaml") (include "training.overrides" . | fromJsonArray) -}}
{{- end -}}
{{- $safe := list -}}
{{- range $words }}{{ $safe = append $safe (replace "$" "$$" .) }}{{ end -}}
{{- toJson $safe -}}
{{- end -}}

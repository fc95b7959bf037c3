{{/* What the container runs. Everything here is data on its way to an argument list: no shell ever sees it. */}}

{{- define "training.runName" -}}
{{- .Values.runName | default .Release.Name -}}
{{- end -}}

{{/* A path below the mount, unless it is absolute already. */}}
{{- define "training.path" -}}
{{- if hasPrefix "/" .path -}}{{ .path }}{{- else -}}{{ printf "%s/%s" (trimSuffix "/" .mount) .path }}{{- end -}}
{{- end -}}

{{/* Whole numbers as such: Helm reads numbers of a values file as floats and would print 1e+06. */}}
{{- define "training.scalar" -}}
{{- if kindIs "float64" . -}}
{{- if eq (floor .) . -}}{{ int64 . }}{{- else -}}{{ . }}{{- end -}}
{{- else -}}{{ toString . }}{{- end -}}
{{- end -}}

{{- define "training.nodes" -}}
{{- if .Values.training.minNodes -}}{{ printf "%d:%d" (int .Values.training.minNodes) (int .Values.training.nodes) }}
{{- else -}}{{ int .Values.training.nodes }}{{- end -}}
{{- end -}}

{{/* Overrides that follow from the values, as a JSON list. */}}
{{- define "training.overrides" -}}
{{- $v := .Values -}}
{{- $words := list (printf "name=%s" (include "training.runName" .)) -}}
{{- $words = append $words (printf "runs_dir=%s" (include "training.path" (dict "path" $v.storage.logsPath "mount" $v.storage.mountPath))) -}}
{{- with $v.model.config }}{{ $words = append $words (printf "model=%s" .) }}{{ end -}}
{{- if eq $v.model.size "custom" -}}
  {{- /* The GPT-3 family's other fields (positions, biases, vocabulary) with a shape of one's own. */ -}}
  {{- $words = append $words "model=gpt3-125m" -}}
  {{- $keys := dict "numLayers" "model.layers" "hiddenSize" "model.hidden" "numAttentionHeads" "model.heads" "seqLength" "model.seq_len" "tensorModelParallelSize" "parallel.tensor" "pipelineModelParallelSize" "parallel.pipeline" -}}
  {{- range $name, $key := $keys -}}
    {{- $value := index $v.model.custom $name -}}
    {{- if not (kindIs "invalid" $value) }}{{ $words = append $words (printf "%s=%d" $key (int64 $value)) }}{{ end -}}
  {{- end -}}
  {{- with $v.model.custom.seqLength }}{{ $words = append $words (printf "model.max_positions=%d" (int64 .)) }}{{ end -}}
{{- else if $v.model.size -}}
  {{- /* Tensor and pipeline degrees that these models were published with. */ -}}
  {{- $degrees := dict "175b" (list 8 16) "30b" (list 4 8) "13b" (list 2 4) "1.3b" (list 1 2) "857m" (list 1 1) "375m" (list 1 1) "125m" (list 1 1) -}}
  {{- $degree := index $degrees $v.model.size -}}
  {{- $words = concat $words (list (printf "model=gpt3-%s" $v.model.size) (printf "parallel.tensor=%d" (index $degree 0 | int64)) (printf "parallel.pipeline=%d" (index $degree 1 | int64))) -}}
{{- end -}}
{{- if $v.model.size -}}
  {{- /* Megatron's training defaults for these models; values and overrides below win. */ -}}
  {{- $words = concat $words (list "microbatch=1" "optimizer.lr=6e-5" "optimizer.weight_decay=0.1" "schedule.name=cosine" "schedule.final=0.1" "optimizer.clip=1.0") -}}
  {{- with $v.training.iterations }}{{ $words = append $words (printf "schedule.warmup=%dba" (max 1 (div (int64 .) 1000))) }}{{ end -}}
{{- end -}}
{{- with $v.training.iterations }}{{ $words = append $words (printf "max_duration=%dba" (int64 .)) }}{{ end -}}
{{- with $v.training.globalBatchSize }}{{ $words = append $words (printf "global_batch=%d" (int64 .)) }}{{ end -}}
{{- with $v.training.microBatchSize }}{{ $words = append $words (printf "microbatch=%d" (int64 .)) }}{{ end -}}
{{- with $v.training.saveInterval }}{{ $words = append $words (printf "checkpoint.interval=%dba" (int64 .)) }}{{ end -}}
{{- with $v.training.evalInterval }}{{ $words = append $words (printf "evaluate.interval=%dba" (int64 .)) }}{{ end -}}
{{- with $v.storage.datasetPath }}{{ $words = append $words (printf "data.path=%s" (include "training.path" (dict "path" . "mount" $v.storage.mountPath))) }}{{ end -}}
{{- with $v.storage.checkpointPath }}{{ $words = append $words (printf "checkpoint.folder=%s" (include "training.path" (dict "path" . "mount" $v.storage.mountPath))) }}{{ end -}}
{{- if $v.metrics.scrape }}{{ $words = concat $words (list (printf "observe.metrics_port=%d" (int $v.metrics.port)) "observe.metrics_host=0.0.0.0") }}{{ end -}}
{{- $words = concat $words $v.overrides -}}
{{- toJson $words -}}
{{- end -}}

{{/* The argument list, as JSON. The kubelet expands $(NAME) and reads $$ as a dollar sign, so each dollar is doubled. */}}
{{- define "training.args" -}}
{{- $v := .Values -}}
{{- $words := list "--nodes" (include "training.nodes" .) "--processes" (printf "%d" (int $v.training.gpusPerNode | max 1)) "--max-restarts" (printf "%d" (int $v.training.maxRestarts)) -}}
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

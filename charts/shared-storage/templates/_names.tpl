{{- define "storage.claim" -}}
{{- .Values.pvc.name | default .Values.storage.pvcName -}}
{{- end -}}

{{- define "storage.class" -}}
{{- .Values.storage.storageClassName | default .Release.Name -}}
{{- end -}}

{{/* "true" for Lustre, created (skuName) or existing (mgsAddress); empty for Blob. */}}
{{- define "storage.isLustre" -}}
{{- with .Values.amlfs -}}
{{- if and .skuName .mgsAddress }}{{ fail "amlfs.skuName creates a file system and amlfs.mgsAddress uses an existing one: set only one of them" }}{{ end -}}
{{- if or .skuName .mgsAddress }}true{{ end -}}
{{- end -}}
{{- end -}}

{{/* The mount options as a YAML list: the given ones, or the defaults of the file system. */}}
{{- define "storage.mountOptions" -}}
{{- $given := .Values.storage.mountOptions -}}
{{- if not (kindIs "invalid" $given) -}}
{{- range $given -}}
{{- if and (include "storage.isLustre" $) (hasPrefix "-" .) -}}
{{- fail (printf "storage.mountOptions has %s, an option of blobfuse, but amlfs selects Lustre; its options are like noatime and flock" .) -}}
{{- end -}}
{{- end -}}
{{- toYaml $given -}}
{{- else if include "storage.isLustre" . -}}
{{- toYaml (list "noatime" "flock") -}}
{{- else if eq .Values.storage.protocol "fuse2" -}}
{{- toYaml (list "-o allow_other" "--use-attr-cache=true" "--cancel-list-on-mount-seconds=10" "-o attr_timeout=120" "-o entry_timeout=120" "-o negative_timeout=120" "--log-level=LOG_WARNING" "--file-cache-timeout-in-seconds=120" "--block-cache" "--block-cache-block-size=32" "--block-cache-parallelism=80") -}}
{{- else -}}
[]
{{- end -}}
{{- end -}}

{{- define "storage.labels" -}}
app.kubernetes.io/name: keepstep
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: shared-storage
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

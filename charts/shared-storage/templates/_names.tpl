{{- define "storage.claim" -}}
{{- .Values.pvc.name | default .Values.storage.pvcName -}}
{{- end -}}

{{- define "storage.class" -}}
{{- .Values.storage.storageClassName | default .Release.Name -}}
{{- end -}}

{{- define "storage.labels" -}}
app.kubernetes.io/name: keepstep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: shared-storage
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "data.labels" -}}
app.kubernetes.io/name: keepstep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: dataset-preprocessing
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "data.queue" -}}
{{- with .Values.kueue.queueName }}
kueue.x-k8s.io/queue-name: {{ . }}
{{- end }}
{{- end -}}

{{/*
An Indexed Job in which task i of n does its share. Argument: dict root, steps: a list of dicts with name, command and
args, done one after the other in each pod. A step that ends in --task gets this pod's share as its last word.
*/}}
{{- define "data.job" -}}
{{- $v := .root.Values -}}
parallelism: {{ int $v.tasks }}
completions: {{ int $v.tasks }}
completionMode: Indexed
backoffLimit: {{ int $v.backoffLimit }}
podFailurePolicy:
  rules:
    # 75: stopped on request with its work kept. 2 and 4: wrong settings or wrong data, which no retry mends.
    - action: Ignore
      onExitCodes:
        operator: In
        values: [75]
    - action: FailJob
      onExitCodes:
        operator: In
        values: [2, 4]
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
template:
  metadata:
    labels:
      {{- include "data.labels" .root | nindent 6 }}
  spec:
    restartPolicy: Never
    {{- with $v.serviceAccountName }}
    serviceAccountName: {{ . }}
    {{- end }}
    automountServiceAccountToken: false
    {{- with $v.image.pullSecrets }}
    imagePullSecrets:
      {{- range . }}
      - name: {{ . }}
      {{- end }}
    {{- end }}
    {{- with $v.priorityClassName }}
    priorityClassName: {{ . }}
    {{- end }}
    {{- with $v.nodeSelector }}
    nodeSelector:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $v.tolerations }}
    tolerations:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $v.affinity }}
    affinity:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    securityContext:
      fsGroup: {{ int $v.security.runAsGroup }}
      {{- if not $v.security.privileged }}
      runAsNonRoot: true
      runAsUser: {{ int $v.security.runAsUser }}
      runAsGroup: {{ int $v.security.runAsGroup }}
      {{- end }}
      seccompProfile:
        type: RuntimeDefault
    {{- if gt (len .steps) 1 }}
    initContainers:
      {{- range initial .steps }}
      {{- include "data.container" (dict "values" $v "step" .) | nindent 6 }}
      {{- end }}
    {{- end }}
    containers:
      {{- include "data.container" (dict "values" $v "step" (last .steps)) | nindent 6 }}
    volumes:
      - name: shared
        persistentVolumeClaim:
          claimName: {{ $v.storage.pvcName | quote }}
      - name: scratch
        emptyDir: {}
{{- end -}}

{{- define "data.container" -}}
{{- $v := .values -}}
- name: {{ .step.name }}
  image: {{ printf "%s:%s" $v.image.repository $v.image.tag | quote }}
  imagePullPolicy: {{ $v.image.pullPolicy }}
  command: {{ toJson .step.command }}
  args:
    # The kubelet expands $(NAME), so each dollar of a value is doubled; the index is the one we mean.
    {{- range .step.args }}
    - {{ replace "$" "$$" . | quote }}
    {{- end }}
    {{- if eq (last .step.args) "--task" }}
    - $(JOB_COMPLETION_INDEX)/{{ int $v.tasks }}
    {{- end }}
  env:
    - name: HF_HOME
      value: /tmp/huggingface
    {{- range $v.secrets }}
    - name: {{ .name }}
      valueFrom:
        secretKeyRef:
          name: {{ .secretName }}
          key: {{ .secretKey | quote }}
    {{- end }}
  {{- if or $v.resources.cpu $v.resources.memory }}
  resources:
    requests:
      {{- with $v.resources.cpu }}
      cpu: {{ . | quote }}
      {{- end }}
      {{- with $v.resources.memory }}
      memory: {{ . }}
      {{- end }}
    {{- with $v.resources.memory }}
    limits:
      memory: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    privileged: {{ $v.security.privileged }}
    {{- if not $v.security.privileged }}
    allowPrivilegeEscalation: false
    {{- end }}
    capabilities:
      drop: ["ALL"]
  volumeMounts:
    - name: shared
      mountPath: {{ $v.storage.mountPath | quote }}
    - name: scratch
      mountPath: /tmp
{{- end -}}

{{/* Words that name the tokenizer, and the step that fetches it where it is a name of the Hub and no file. */}}
{{- define "data.tokenizer" -}}
{{- if hasSuffix ".json" . -}}{{ . }}{{- else -}}/tmp/tokenizer/tokenizer.json{{- end -}}
{{- end -}}

{{- define "data.fetchTokenizer" -}}
{{- if hasSuffix ".json" . -}}[]{{- else -}}
{{- toJson (list (dict "name" "tokenizer" "command" (list "hf" "download") "args" (list . "tokenizer.json" "--local-dir" "/tmp/tokenizer"))) -}}
{{- end -}}
{{- end -}}

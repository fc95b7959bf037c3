{{- define "data.labels" -}}
app.kubernetes.io/name: keepstep
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: dataset-download
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "data.queue" -}}
{{- with .Values.kueue.queueName }}
kueue.x-k8s.io/queue-name: {{ . | quote }}
{{- end }}
{{- end -}}

{{/*
An Indexed Job: task i of n does its share. Argument: dict root, steps: a list of dicts with name, command and
args, run one after the other in each pod. A step that ends in --task gets this pod's share as its last argument.
*/}}
{{- define "data.job" -}}
{{- $v := .root.Values -}}
parallelism: {{ int $v.tasks }}
completions: {{ int $v.tasks }}
completionMode: Indexed
backoffLimit: {{ int $v.backoffLimit }}
podFailurePolicy:
  rules:
    # 75: stopped on request, work saved. 2 and 4: wrong settings or wrong data, which a retry cannot fix.
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
    serviceAccountName: {{ . | quote }}
    {{- end }}
    automountServiceAccountToken: false
    {{- with $v.image.pullSecrets }}
    imagePullSecrets:
      {{- range . }}
      - name: {{ . | quote }}
      {{- end }}
    {{- end }}
    {{- with $v.priorityClassName }}
    priorityClassName: {{ . | quote }}
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
      # Otherwise every pod start changes the group of every file on the volume.
      fsGroupChangePolicy: OnRootMismatch
      {{- if not $v.security.privileged }}
      runAsNonRoot: true
      runAsUser: {{ int $v.security.runAsUser }}
      runAsGroup: {{ int $v.security.runAsGroup }}
      {{- end }}
      seccompProfile:
        type: RuntimeDefault
    {{- if or $v.storage.setOwner (gt (len .steps) 1) }}
    initContainers:
      {{- if $v.storage.setOwner }}
      {{- include "data.owner" $v | nindent 6 }}
      {{- end }}
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
      {{- with $v.extraVolumes }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
{{- end -}}

{{/* For a volume on which only root can write: the one container that runs as root, with one capability. */}}
{{- define "data.owner" -}}
- name: owner
  image: {{ printf "%s:%s" .image.repository .image.tag | quote }}
  imagePullPolicy: {{ .image.pullPolicy | quote }}
  command: ["chown", {{ printf "%d:%d" (int .security.runAsUser) (int .security.runAsGroup) | quote }}]
  args: [{{ .storage.mountPath | replace "$" "$$" | quote }}]
  securityContext:
    runAsUser: 0
    runAsNonRoot: false
    privileged: false
    allowPrivilegeEscalation: false
    capabilities:
      drop: ["ALL"]
      add: ["CHOWN"]
  volumeMounts:
    - name: shared
      mountPath: {{ .storage.mountPath | quote }}
{{- end -}}

{{- define "data.container" -}}
{{- $v := .values -}}
- name: {{ .step.name | quote }}
  image: {{ printf "%s:%s" $v.image.repository $v.image.tag | quote }}
  imagePullPolicy: {{ $v.image.pullPolicy | quote }}
  command: {{ toJson .step.command }}
  args:
    # The kubelet expands $(NAME), so double each dollar of a value. Only the index must be expanded.
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
    - name: {{ .name | quote }}
      valueFrom:
        secretKeyRef:
          name: {{ .secretName | quote }}
          key: {{ .secretKey | quote }}
    {{- end }}
  {{- if or $v.resources.cpu $v.resources.memory }}
  resources:
    requests:
      {{- with $v.resources.cpu }}
      cpu: {{ . | quote }}
      {{- end }}
      {{- with $v.resources.memory }}
      memory: {{ . | quote }}
      {{- end }}
    {{- with $v.resources.memory }}
    limits:
      memory: {{ . | quote }}
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
    {{- with $v.extraVolumeMounts }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Arguments that name the tokenizer, and the step that downloads it if it is a name on the Hub and not a file. */}}
{{- define "data.tokenizer" -}}
{{- if hasSuffix ".json" . -}}{{ . }}{{- else -}}/tmp/tokenizer/tokenizer.json{{- end -}}
{{- end -}}

{{- define "data.fetchTokenizer" -}}
{{- if hasSuffix ".json" . -}}[]{{- else -}}
{{- toJson (list (dict "name" "tokenizer" "command" (list "hf" "download") "args" (list . "tokenizer.json" "--local-dir" "/tmp/tokenizer"))) -}}
{{- end -}}
{{- end -}}

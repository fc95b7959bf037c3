{{- define "training.labels" -}}
app.kubernetes.io/name: keepstep
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: training
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "training.image" -}}
{{ printf "%s:%s" .Values.image.repository .Values.image.tag }}
{{- end -}}

{{/* Variables in rising order of weight: elastic and machine profile, SHARP, the user's own, secrets. */}}
{{- define "training.env" -}}
{{- $v := .Values -}}
{{- $profiles := .Files.Get "environments.yaml" | fromYaml -}}
{{- $merged := deepCopy (index $profiles "elastic") -}}
{{- if ne $v.environment.profile "none" }}{{ $merged = mergeOverwrite $merged (index $profiles $v.environment.profile) }}{{ end -}}
{{- if eq (int $v.training.useSharp) 1 }}{{ $merged = mergeOverwrite $merged (index $profiles "sharp") }}{{ end -}}
{{- /* The launcher gives up on its workers before Kubernetes gives up on the launcher. */ -}}
{{- $grace := int $v.terminationGracePeriodSeconds -}}
{{- $_ := set $merged "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" (sub $grace (min 60 (div $grace 10)) | toString) -}}
{{- /* What is saved anywhere else goes with the pod: the launcher refuses it. */ -}}
{{- $_ := set $merged "KEEPSTEP_VOLUMES" $v.storage.mountPath -}}
{{- $merged = mergeOverwrite $merged $v.environment.variables -}}
{{- $env := list -}}
{{- range $name, $value := $merged }}{{ $env = append $env (dict "name" $name "value" (include "training.scalar" $value | replace "$" "$$")) }}{{ end -}}
{{- /* The machine, which a health check has to name: the host name is the pod's, and gone with it. */ -}}
{{- $env = append $env (dict "name" "KEEPSTEP_NODE" "valueFrom" (dict "fieldRef" (dict "fieldPath" "spec.nodeName"))) -}}
{{- if eq $v.jobKind "jobset" -}}
{{- $env = append $env (dict "name" "MASTER_ADDR" "value" (printf "%s-node-0-0.%s" .Release.Name .Release.Name)) -}}
{{- $env = append $env (dict "name" "MASTER_PORT" "value" "29500") -}}
{{- end -}}
{{- if $v.metrics.scrape -}}
{{- $env = append $env (dict "name" "KEEPSTEP_METRICS_TOKEN" "valueFrom" (dict "secretKeyRef" (dict "name" $v.metrics.tokenSecret "key" $v.metrics.tokenKey))) -}}
{{- end -}}
{{- range $v.secrets -}}
{{- $env = append $env (dict "name" .name "valueFrom" (dict "secretKeyRef" (dict "name" .secretName "key" .secretKey))) -}}
{{- end -}}
{{- toYaml $env -}}
{{- end -}}

{{- define "training.resources" -}}
{{- $r := .Values.resources -}}
{{- $gpus := int .Values.training.gpusPerNode -}}
{{- $list := dict -}}
{{- if $gpus }}{{ $_ := set $list $r.gpuResource (toString $gpus) }}{{ end -}}
{{- if and $gpus $r.rdmaResource }}{{ $_ := set $list $r.rdmaResource (toString (int ($r.rdmaCount | default $gpus))) }}{{ end -}}
{{- with $r.cpu }}{{ $_ := set $list "cpu" (toString .) }}{{ end -}}
{{- with $r.memory }}{{ $_ := set $list "memory" . }}{{ end -}}
{{- toYaml (dict "requests" $list "limits" $list) -}}
{{- end -}}

{{/* The pod template, the same for every job kind. Argument: dict root, container (its name), restartPolicy. */}}
{{- define "training.pod" -}}
{{- $root := .root -}}
{{- $v := $root.Values -}}
metadata:
  labels:
    {{- include "training.labels" $root | nindent 4 }}
    {{- if eq $v.jobKind "pytorchjob" }}
    job-name: {{ $root.Release.Name }}
    {{- end }}
  annotations:
    checksum/config: {{ include (print $root.Template.BasePath "/configmap.yaml") $root | sha256sum }}
    {{- if $v.metrics.scrape }}
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ $v.metrics.port | quote }}
    prometheus.io/path: /metrics
    {{- end }}
spec:
  restartPolicy: {{ .restartPolicy }}
  terminationGracePeriodSeconds: {{ int $v.terminationGracePeriodSeconds }}
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
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
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
  containers:
    - name: {{ .container }}
      image: {{ include "training.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy }}
      # The launcher is the container's first process, so that it gets the stop request and its exit code counts.
      command: ["keepstep", "launch", "node"]
      args: {{ include "training.args" $root }}
      env:
        {{- include "training.env" $root | nindent 8 }}
      {{- if $v.metrics.scrape }}
      ports:
        - name: metrics
          containerPort: {{ int $v.metrics.port }}
          protocol: TCP
      {{- end }}
      resources:
        {{- include "training.resources" $root | nindent 8 }}
      securityContext:
        {{- if $v.security.privileged }}
        privileged: true
        {{- else }}
        privileged: false
        allowPrivilegeEscalation: false
        {{- end }}
        capabilities:
          drop: ["ALL"]
          # RDMA registers memory that must not be paged out.
          add: ["IPC_LOCK"]
      volumeMounts:
        - name: config
          mountPath: /etc/keepstep
          readOnly: true
        - name: shared
          mountPath: {{ $v.storage.mountPath | quote }}
        - name: shm
          mountPath: /dev/shm
        - name: scratch
          mountPath: /tmp
  volumes:
    - name: config
      configMap:
        name: {{ printf "%s-config" $root.Release.Name }}
    - name: shared
      persistentVolumeClaim:
        claimName: {{ $v.storage.pvcName | quote }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $v.resources.shmSize }}
    - name: scratch
      emptyDir: {}
{{- end -}}

{{/* What JobSet, with which Trainer v2 runs jobs too, does when the Job fails: start all of it again, unless that cannot help. */}}
{{- define "training.failurePolicy" -}}
maxRestarts: {{ int .Values.training.backoffLimit }}
rules:
  # The Job's own rule has ended it for its exit code, 2 or 4. Without this one JobSet would start it again all the same.
  - name: wrong
    action: FailJobSet
    onJobFailureReasons: ["PodFailurePolicy"]
{{- end -}}

{{/* The Indexed Job that JobSet and Trainer v2 run, one pod a node. */}}
{{- define "training.job" -}}
{{- $v := .Values -}}
parallelism: {{ int $v.training.nodes }}
completions: {{ int $v.training.nodes }}
completionMode: Indexed
backoffLimit: {{ int $v.training.backoffLimit }}
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    # 75: saved and stopped on request. Start again; it is no failure.
    - action: Ignore
      onExitCodes:
        containerName: node
        operator: In
        values: [75]
    # 2: the configuration is wrong, 4: the data is. Trying again cannot help.
    - action: FailJob
      onExitCodes:
        containerName: node
        operator: In
        values: [2, 4]
    # The node was drained, preempted or lost.
    - action: Ignore
      onPodConditions:
        - type: DisruptionTarget
          status: "True"
template:
  {{- include "training.pod" (dict "root" . "container" "node" "restartPolicy" "Never") | nindent 2 }}
{{- end -}}

{{- define "training.labels" -}}
app.kubernetes.io/name: keepstep
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: training
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "training.image" -}}
{{ printf "%s:%s" .Values.image.repository .Values.image.tag }}
{{- end -}}

{{/* Variables in order of increasing priority: elastic and machine profile, SHARP, the user's own, secrets. */}}
{{- define "training.env" -}}
{{- $v := .Values -}}
{{- $profiles := .Files.Get "environments.yaml" | fromYaml -}}
{{- $merged := deepCopy (index $profiles "elastic") -}}
{{- if ne $v.environment.profile "none" }}{{ $merged = mergeOverwrite $merged (index $profiles $v.environment.profile) }}{{ end -}}
{{- if eq (int $v.training.useSharp) 1 }}{{ $merged = mergeOverwrite $merged (index $profiles "sharp") }}{{ end -}}
{{- /* The launcher must end its workers before Kubernetes kills the launcher. */ -}}
{{- $grace := int $v.terminationGracePeriodSeconds -}}
{{- $_ := set $merged "TORCH_ELASTIC_SHUTDOWN_TIMEOUT" (sub $grace (min 60 (div $grace 10)) | toString) -}}
{{- /* Files anywhere else are deleted with the pod, so the launcher refuses to save there. */ -}}
{{- $volumes := list $v.storage.mountPath -}}
{{- $persistent := list -}}
{{- range $v.extraVolumes }}{{ if or .persistentVolumeClaim .nfs .csi }}{{ $persistent = append $persistent .name }}{{ end }}{{ end -}}
{{- range $v.extraVolumeMounts }}{{ if has .name $persistent }}{{ $volumes = append $volumes .mountPath }}{{ end }}{{ end -}}
{{- $_ := set $merged "KEEPSTEP_VOLUMES" (join ":" $volumes) -}}
{{- $merged = mergeOverwrite $merged $v.environment.variables -}}
{{- $env := list -}}
{{- range $name, $value := $merged }}{{ $env = append $env (dict "name" $name "value" (include "training.scalar" $value | replace "$" "$$")) }}{{ end -}}
{{- /* A health check must name the machine; the host name is only the pod's. */ -}}
{{- $env = append $env (dict "name" "KEEPSTEP_NODE" "valueFrom" (dict "fieldRef" (dict "fieldPath" "spec.nodeName"))) -}}
{{- $leaders := dict "jobset" "%s-node-0-0.%s" "volcano" "%s-node-0.%s" "leaderworkerset" "%s-0.%s" -}}
{{- with index $leaders $v.jobKind -}}
{{- $env = append $env (dict "name" "MASTER_ADDR" "value" (printf . $.Release.Name $.Release.Name)) -}}
{{- $env = append $env (dict "name" "MASTER_PORT" "value" "29500") -}}
{{- end -}}
{{- if gt (int $v.training.nodes) 1 -}}
{{- $env = append $env (dict "name" "KEEPSTEP_RENDEZVOUS_SECRET" "valueFrom" (dict "secretKeyRef" (dict "name" (printf "%s-rendezvous" .Release.Name) "key" "secret"))) -}}
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
{{- $onTmp := and (ne $v.localDisk.kind "none") (eq $v.localDisk.mountPath "/tmp") -}}
metadata:
  labels:
    {{- include "training.labels" $root | nindent 4 }}
    {{- if eq $v.jobKind "pytorchjob" }}
    job-name: {{ $root.Release.Name | quote }}
    {{- end }}
  annotations:
    checksum/config: {{ include (print $root.Template.BasePath "/configmap.yaml") $root | sha256sum }}
    {{- if and $v.kueue.requiredTopology $v.kueue.preferredTopology }}
    {{- fail "kueue.requiredTopology and kueue.preferredTopology exclude each other: Kueue refuses a pod with both; set one" }}
    {{- end }}
    {{- with $v.kueue.requiredTopology }}
    kueue.x-k8s.io/podset-required-topology: {{ . | quote }}
    {{- end }}
    {{- with $v.kueue.preferredTopology }}
    kueue.x-k8s.io/podset-preferred-topology: {{ . | quote }}
    {{- end }}
    {{- if $v.metrics.scrape }}
    prometheus.io/scrape: "true"
    prometheus.io/port: {{ $v.metrics.port | quote }}
    prometheus.io/path: /metrics
    {{- end }}
spec:
  restartPolicy: {{ .restartPolicy }}
  terminationGracePeriodSeconds: {{ int $v.terminationGracePeriodSeconds }}
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
  {{- with $v.schedulerName }}
  schedulerName: {{ . | quote }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . | quote }}
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
    # Otherwise every pod start changes the group of every file on the volume.
    fsGroupChangePolicy: OnRootMismatch
    {{- if not $v.security.privileged }}
    runAsNonRoot: true
    runAsUser: {{ int $v.security.runAsUser }}
    runAsGroup: {{ int $v.security.runAsGroup }}
    {{- end }}
    seccompProfile:
      type: RuntimeDefault
  {{- $owned := list -}}
  {{- if $v.storage.setOwner }}{{ $owned = append $owned (dict "name" "shared" "mountPath" $v.storage.mountPath) }}{{ end -}}
  {{- /* Kubernetes applies fsGroup to every kind of local disk but a folder of the node. */ -}}
  {{- if eq $v.localDisk.kind "hostPath" }}{{ $owned = append $owned (dict "name" "local" "mountPath" $v.localDisk.mountPath) }}{{ end -}}
  {{- with $owned }}
  initContainers:
    - name: owner
      image: {{ include "training.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy | quote }}
      command: ["chown", {{ printf "%d:%d" (int $v.security.runAsUser) (int $v.security.runAsGroup) | quote }}]
      args:
        {{- range . }}
        - {{ .mountPath | replace "$" "$$" | quote }}
        {{- end }}
      securityContext:
        runAsUser: 0
        runAsNonRoot: false
        privileged: false
        allowPrivilegeEscalation: false
        capabilities:
          drop: ["ALL"]
          add: ["CHOWN"]
      volumeMounts:
        {{- toYaml . | nindent 8 }}
  {{- end }}
  containers:
    - name: {{ .container | quote }}
      image: {{ include "training.image" $root | quote }}
      imagePullPolicy: {{ $v.image.pullPolicy | quote }}
      # The launcher is the container's first process, so it gets the stop request and its exit code is the pod's.
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
        {{- if ne $v.localDisk.kind "none" }}
        - name: local
          mountPath: {{ $v.localDisk.mountPath | quote }}
        {{- end }}
        {{- if not $onTmp }}
        - name: scratch
          mountPath: /tmp
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: config
      configMap:
        name: {{ printf "%s-config" $root.Release.Name | quote }}
    - name: shared
      persistentVolumeClaim:
        claimName: {{ $v.storage.pvcName | quote }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ $v.resources.shmSize | quote }}
    {{- if ne $v.localDisk.kind "none" }}
    - name: local
      {{- include "training.localDisk" $v.localDisk | nindent 6 }}
    {{- end }}
    {{- if not $onTmp }}
    - name: scratch
      emptyDir: {}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* The source of the volume on the node's own disk. */}}
{{- define "training.localDisk" -}}
{{- if eq .kind "emptyDir" -}}
emptyDir:
  {{- if .size }}
  sizeLimit: {{ .size | quote }}
  {{- else }} {}
  {{- end }}
{{- else if eq .kind "hostPath" -}}
hostPath:
  path: {{ .hostPath | quote }}
  type: DirectoryOrCreate
{{- else -}}
# A volume that is created and deleted with the pod, by a provisioner of local disks.
ephemeral:
  volumeClaimTemplate:
    spec:
      accessModes: ["ReadWriteOnce"]
      storageClassName: {{ .storageClassName | quote }}
      resources:
        requests:
          storage: {{ .size | quote }}
{{- end -}}
{{- end -}}

{{/* What JobSet (which Trainer v2 also uses) does if the Job fails: restart all of it, unless a restart cannot help. */}}
{{- define "training.failurePolicy" -}}
maxRestarts: {{ int .Values.training.backoffLimit }}
rules:
  # The Job's own rule has ended it because of exit code 2 or 4. Without this rule JobSet would restart it anyway.
  - name: wrong
    action: FailJobSet
    onJobFailureReasons: ["PodFailurePolicy"]
{{- end -}}

{{/* The Indexed Job that JobSet and Trainer v2 run, one pod per node. */}}
{{- define "training.job" -}}
{{- $v := .Values -}}
parallelism: {{ int $v.training.nodes }}
completions: {{ int $v.training.nodes }}
completionMode: Indexed
{{- if $v.training.survive }}
# The others train on without a pod that fails, so its failures are its own. The first pod knows when the run is done.
backoffLimitPerIndex: {{ int $v.training.backoffLimit }}
successPolicy:
  rules:
    - succeededIndexes: "0"
{{- else }}
backoffLimit: {{ int $v.training.backoffLimit }}
{{- end }}
podReplacementPolicy: Failed
podFailurePolicy:
  rules:
    # 75: saved and stopped on request. Restart; this is not a failure.
    - action: Ignore
      onExitCodes:
        containerName: node
        operator: In
        values: [75]
    # 2: wrong configuration, 4: wrong data. A retry cannot help.
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

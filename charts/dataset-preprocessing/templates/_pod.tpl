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

{{/* An Indexed Job in which task i of n does its share. Argument: dict root, words (a list, without --task). */}}
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
        containerName: data
        operator: In
        values: [75]
    - action: FailJob
      onExitCodes:
        containerName: data
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
    containers:
      - name: data
        image: {{ printf "%s:%s" $v.image.repository $v.image.tag | quote }}
        imagePullPolicy: {{ $v.image.pullPolicy }}
        command: ["keepstep", "data"]
        args:
          # The kubelet expands $(NAME), so each dollar of a value is doubled; the index is the one we mean.
          {{- range .words }}
          - {{ replace "$" "$$" . | quote }}
          {{- end }}
          - --task
          - $(JOB_COMPLETION_INDEX)/{{ int $v.tasks }}
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
    volumes:
      - name: shared
        persistentVolumeClaim:
          claimName: {{ $v.storage.pvcName | quote }}
      - name: scratch
        emptyDir: {}
{{- end -}}

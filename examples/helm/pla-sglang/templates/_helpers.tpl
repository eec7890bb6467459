{{/* An environment variable with the key of a Secret: a list of the variable and the Secret, which may be empty. */}}
{{- define "key" }}
{{- if index . 1 }}
- name: {{ index . 0 }}
  valueFrom: {secretKeyRef: {name: {{ index . 1 }}, key: key}}
{{- end }}
{{- end }}

{{/* Of a pod: where it runs. */}}
{{- define "placement" }}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

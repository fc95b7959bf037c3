# The values of SOperator's charts (1.22): storage, then the Slurm cluster. They depend on variables and on local.login
# alone, so Terraform can evaluate them without an account.

locals {
  gpu_preset = regex("^(?P<gpus>[0-9]+)gpu-(?P<cpus>[0-9]+)vcpu-(?P<memory>[0-9]+)gb$", var.slurm_nodeset_workers[0].resource.preset)
  boot_disk  = min([for set in var.slurm_nodeset_workers : set.boot_disk.size_gibibytes]...)

  # What Kubernetes leaves of a node, less munge next to slurmd. A pod that asks for more than its node has never starts.
  munge = { cpu = "100m", memory = "512Mi", ephemeralStorage = "5Gi" }
  worker = {
    cpu               = local.gpu_preset.cpus - 2
    memory            = floor(local.gpu_preset.memory * 0.95) - 4
    ephemeral_storage = floor(local.boot_disk * 0.85) - 48 - 5
    gpus              = tonumber(local.gpu_preset.gpus)
  }

  nodeset_label = "slurm.nebius.ai/nodeset"
  jail_label    = "slurm.nebius.ai/jail"
  gpu_taint     = "nvidia.com/gpu"

  # The tag under which a node sees a filestore. helm-slurm-cluster-storage mounts each one at /mnt/TAG on every node and
  # names its claim TAG-pvc.
  filestore_tags = merge(
    { jail = "jail", controller-spool = "controller-spool" },
    { for mount in var.filestore_jail_submounts : mount.name => "jail-submount-${mount.name}" },
  )
  filestore_sizes = merge(
    { jail = var.filestore_jail, controller-spool = { size_gibibytes = 128, block_size_kibibytes = 4 } },
    { for mount in var.filestore_jail_submounts : mount.name => mount.spec },
  )

  # A disk of its own for each worker, which no other node sees: scratch.
  local_disk_classes = {
    for mount in var.node_local_jail_submounts : mount.name =>
    "compute-csi-${lower(replace(mount.disk_type, "_", "-"))}-${mount.filesystem_type}"
  }

  gpu_toleration = { key = local.gpu_taint, operator = "Exists", effect = "NoSchedule" }
  on_nodeset = {
    for name in ["system", "worker"] : name => {
      nodeAffinity = { requiredDuringSchedulingIgnoredDuringExecution = { nodeSelectorTerms = [
        { matchExpressions = [{ key = local.nodeset_label, operator = "In", values = [name] }] },
      ] } }
    }
  }
  shared_mounts = [
    for mount in var.filestore_jail_submounts : {
      name             = mount.name
      mountPath        = mount.mount_path
      volumeSourceName = local.filestore_tags[mount.name]
    }
  ]
  # A pod that starts before its file system is mounted would write to the node's own disk.
  require_mounts = {
    for name, mounts in {
      jail   = { jail = "virtiofs" }
      login  = merge({ jail = "virtiofs" }, { for mount in var.filestore_jail_submounts : mount.name => "virtiofs" })
      worker = merge({ jail = "virtiofs" }, { for mount in var.filestore_jail_submounts : mount.name => "virtiofs" }, { for mount in var.node_local_jail_submounts : mount.name => mount.filesystem_type })
      } : name => [
      for volume, kind in mounts : {
        name         = "require-${volume}"
        image        = "${trimprefix(var.soperator_charts.repository, "oci://")}/busybox"
        command      = ["grep", " /volume ${kind} ", "/proc/mounts"]
        volumeMounts = [{ name = volume, mountPath = "/volume" }]
      }
    ]
  }

  storage_values = {
    volume = {
      jail            = { size = "${local.filestore_sizes.jail.size_gibibytes}Gi", type = "filestore", filestoreDeviceName = local.filestore_tags.jail }
      controllerSpool = { size = "${local.filestore_sizes.controller-spool.size_gibibytes}Gi", filestoreDeviceName = local.filestore_tags.controller-spool }
      accounting      = { enabled = false }
      jailSubMounts = [
        for mount in var.filestore_jail_submounts : {
          name                = mount.name
          size                = "${mount.spec.size_gibibytes}Gi"
          filestoreDeviceName = local.filestore_tags[mount.name]
        }
      ]
    }
    storage = {
      jail = {
        matchExpressions = [{ key = local.jail_label, operator = "In", values = ["true"] }]
        tolerations      = [local.gpu_toleration]
      }
      controllerSpool = {
        matchExpressions = [{ key = local.nodeset_label, operator = "In", values = ["system"] }]
        tolerations      = []
      }
    }
  }

  cluster_values = {
    clusterName = var.company_name
    clusterType = "gpu"
    k8sNodeFilters = [
      { name = "system", affinity = local.on_nodeset.system, tolerations = [] },
      { name = "worker", affinity = local.on_nodeset.worker, tolerations = [local.gpu_toleration] },
    ]
    # Claims of helm-slurm-cluster-storage, so the chart makes none of its own.
    volumeSources = concat(
      [for name, tag in local.filestore_tags : { name = tag, persistentVolumeClaim = { claimName = "${tag}-pvc", readOnly = false } }],
      [{ name = "worker-spool", emptyDir = { sizeLimit = "${local.worker.ephemeral_storage}Gi" } }],
    )
    populateJail = { k8sNodeFilterName = "system" }
    slurmConfig  = { defMemPerNode = local.worker.memory * 1024 }
    slurmNodes = {
      accounting = { enabled = false, k8sNodeFilterName = "system" }
      rest       = { enabled = false, k8sNodeFilterName = "system" }
      exporter   = { k8sNodeFilterName = "system" }
      controller = {
        k8sNodeFilterName    = "system"
        munge                = { resources = local.munge }
        customInitContainers = local.require_mounts.jail
        # null removes the chart's own claim template: a volume has one source.
        volumes = { spool = { volumeClaimTemplateSpec = null, volumeSourceName = "controller-spool" } }
      }
      worker = {
        size              = sum([for set in var.slurm_nodeset_workers : set.size])
        k8sNodeFilterName = "worker"
        slurmd = { resources = {
          cpu              = "${local.worker.cpu}"
          memory           = "${local.worker.memory}Gi"
          ephemeralStorage = "${local.worker.ephemeral_storage}Gi"
          gpu              = local.worker.gpus
        } }
        munge                = { resources = local.munge }
        customInitContainers = local.require_mounts.worker
        volumes = {
          spool = { volumeClaimTemplateSpec = null, volumeSourceName = "worker-spool" }
          jailSubMounts = concat(local.shared_mounts, [
            for mount in var.node_local_jail_submounts : {
              name      = mount.name
              mountPath = mount.mount_path
              volumeClaimTemplateSpec = {
                accessModes      = ["ReadWriteOnce"]
                storageClassName = local.local_disk_classes[mount.name]
                resources        = { requests = { storage = "${mount.size_gibibytes}Gi" } }
              }
            }
          ])
        }
      }
      login = {
        size                   = 1
        k8sNodeFilterName      = "system"
        sshRootPublicKeys      = var.slurm_login_ssh_root_public_keys
        sshdServiceType        = "LoadBalancer"
        sshdServiceAnnotations = { "nebius.com/load-balancer-allocation-id" = local.login.allocation_id }
        munge                  = { resources = local.munge }
        customInitContainers   = local.require_mounts.login
        volumes                = { jailSubMounts = local.shared_mounts }
      }
    }
    sConfigController = { node = { k8sNodeFilterName = "system" } }
  }
}

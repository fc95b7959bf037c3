# A Slurm cluster on Managed Kubernetes: SOperator runs slurmctld, login and worker nodes as pods that share one root.

locals {
  gib = 1024 * 1024 * 1024
  kib = 1024

  filestores = merge(
    { jail = { size_gibibytes = var.filestore_jail.size_gibibytes, block_size_kibibytes = var.filestore_jail.block_size_kibibytes } },
    { controller-spool = { size_gibibytes = 128, block_size_kibibytes = 4 } },
    { for mount in var.filestore_jail_submounts : mount.name => mount.spec },
  )
  mounted = [
    for name, _ in local.filestores : {
      attach_mode         = "READ_WRITE"
      mount_tag           = name
      existing_filesystem = { id = nebius_compute_v1_filesystem.this[name].id }
    }
  ]
  wants_fabric = anytrue([for set in var.slurm_nodeset_workers : startswith(set.resource.preset, "8gpu-")])
}

resource "nebius_compute_v1_filesystem" "this" {
  for_each = local.filestores

  parent_id        = var.iam_project_id
  name             = "${var.company_name}-${each.key}"
  type             = "NETWORK_SSD"
  size_bytes       = each.value.size_gibibytes * local.gib
  block_size_bytes = each.value.block_size_kibibytes * local.kib
}

resource "nebius_compute_v1_gpu_cluster" "this" {
  count = local.wants_fabric ? 1 : 0

  parent_id         = var.iam_project_id
  name              = "${var.company_name}-${var.infiniband_fabric}"
  infiniband_fabric = var.infiniband_fabric
}

resource "nebius_mk8s_v1_cluster" "this" {
  parent_id = var.iam_project_id
  name      = var.company_name

  control_plane = {
    subnet_id         = var.vpc_subnet_id
    version           = var.k8s_version
    etcd_cluster_size = 3
    endpoints         = { public_endpoint = {} }
  }

  lifecycle {
    precondition {
      condition     = var.infiniband_fabric != "" || !local.wants_fabric
      error_message = "infiniband_fabric must be given for presets with 8 GPUs (fabric-7, for example)."
    }
  }
}

# Controller, login and the operator itself.
resource "nebius_mk8s_v1_node_group" "system" {
  parent_id        = nebius_mk8s_v1_cluster.this.id
  name             = "system"
  version          = var.k8s_version
  fixed_node_count = 3

  template = {
    metadata           = { labels = { "slurm.nebius.ai/nodeset" = "system" } }
    resources          = { platform = "cpu-d3", preset = "16vcpu-64gb" }
    boot_disk          = { type = "NETWORK_SSD", size_bytes = 256 * local.gib, block_size_bytes = 4 * local.kib }
    filesystems        = local.mounted
    network_interfaces = [{ subnet_id = var.vpc_subnet_id }]
  }
}

resource "nebius_mk8s_v1_node_group" "workers" {
  for_each = { for index, set in var.slurm_nodeset_workers : tostring(index) => set }

  parent_id        = nebius_mk8s_v1_cluster.this.id
  name             = "worker-${each.key}"
  version          = var.k8s_version
  fixed_node_count = each.value.size

  template = {
    metadata  = { labels = { "slurm.nebius.ai/nodeset" = "worker" } }
    taints    = [{ key = "nvidia.com/gpu", value = "true", effect = "NO_SCHEDULE" }]
    resources = each.value.resource
    boot_disk = {
      type             = each.value.boot_disk.type
      size_bytes       = each.value.boot_disk.size_gibibytes * local.gib
      block_size_bytes = each.value.boot_disk.block_size_kibibytes * local.kib
    }
    gpu_settings       = { drivers_preset = "cuda12" }
    gpu_cluster        = startswith(each.value.resource.preset, "8gpu-") ? { id = nebius_compute_v1_gpu_cluster.this[0].id } : null
    filesystems        = local.mounted
    network_interfaces = [{ subnet_id = var.vpc_subnet_id }]
  }
}

# A fixed address, so that a login pod that moves keeps it.
resource "nebius_vpc_v1_allocation" "login" {
  parent_id   = var.iam_project_id
  name        = "${var.company_name}-login"
  ipv4_public = { subnet_id = var.vpc_subnet_id }
}

resource "helm_release" "soperator" {
  name             = "soperator"
  namespace        = "soperator-system"
  create_namespace = true
  repository       = var.soperator_charts.repository
  chart            = "helm-soperator"
  version          = var.soperator_charts.version
  wait             = true

  depends_on = [nebius_mk8s_v1_node_group.system]
}

resource "helm_release" "slurm_cluster" {
  name             = "slurm-cluster"
  namespace        = "soperator"
  create_namespace = true
  repository       = var.soperator_charts.repository
  chart            = "helm-slurm-cluster"
  version          = var.soperator_charts.version
  timeout          = 1800

  values = [yamlencode({
    clusterName = var.company_name
    volumeSources = [
      for name, _ in local.filestores : {
        name      = name
        createPVC = true
        size      = "${local.filestores[name].size_gibibytes}Gi"
      }
    ]
    slurmNodes = {
      controller = { size = 1 }
      worker = {
        size = sum([for set in var.slurm_nodeset_workers : set.size])
        volumes = {
          jailSubMounts = [
            for mount in var.filestore_jail_submounts : {
              name             = mount.name
              mountPath        = mount.mount_path
              volumeSourceName = mount.name
            }
          ]
        }
      }
      login = {
        size              = 1
        sshRootPublicKeys = var.slurm_login_ssh_root_public_keys
        sshdServiceType   = "LoadBalancer"
        sshdServiceAnnotations = {
          "nebius.com/load-balancer-allocation-id" = nebius_vpc_v1_allocation.login.id
        }
      }
    }
  })]

  depends_on = [helm_release.soperator, nebius_mk8s_v1_node_group.workers]
}

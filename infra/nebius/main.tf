# A Slurm cluster on Managed Kubernetes: SOperator runs slurmctld, login and worker nodes as pods that share one root.

locals {
  gib = 1024 * 1024 * 1024
  kib = 1024

  mounted = [
    for name, tag in local.filestore_tags : {
      attach_mode         = "READ_WRITE"
      mount_tag           = tag
      existing_filesystem = { id = nebius_compute_v1_filesystem.this[name].id }
    }
  ]
  login        = { allocation_id = nebius_vpc_v1_allocation.login.id }
  wants_fabric = anytrue([for set in var.slurm_nodeset_workers : startswith(set.resource.preset, "8gpu-")])
}

resource "nebius_compute_v1_filesystem" "this" {
  for_each = local.filestore_sizes

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
      error_message = "infiniband_fabric is required for presets with 8 GPUs, for example fabric-7."
    }

    precondition {
      condition = length(distinct(concat(
        ["jail", "controller-spool"], var.filestore_jail_submounts[*].name, var.node_local_jail_submounts[*].name,
      ))) == 2 + length(var.filestore_jail_submounts) + length(var.node_local_jail_submounts)
      error_message = "filestore_jail_submounts and node_local_jail_submounts: each name must be unique, and neither jail nor controller-spool."
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
    metadata           = { labels = { (local.nodeset_label) = "system", (local.jail_label) = "true" } }
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
    metadata  = { labels = { (local.nodeset_label) = "worker", (local.jail_label) = "true" } }
    taints    = [{ key = local.gpu_taint, value = "true", effect = "NO_SCHEDULE" }]
    resources = each.value.resource
    boot_disk = {
      type             = each.value.boot_disk.type
      size_bytes       = each.value.boot_disk.size_gibibytes * local.gib
      block_size_bytes = each.value.boot_disk.block_size_kibibytes * local.kib
    }
    gpu_cluster        = startswith(each.value.resource.preset, "8gpu-") ? { id = nebius_compute_v1_gpu_cluster.this[0].id } : null
    filesystems        = local.mounted
    network_interfaces = [{ subnet_id = var.vpc_subnet_id }]
  }
}

# A fixed address, so that a login pod keeps it when it moves.
resource "nebius_vpc_v1_allocation" "login" {
  parent_id   = var.iam_project_id
  name        = "${var.company_name}-login"
  ipv4_public = { cidr = "/32", subnet_id = var.vpc_subnet_id }
}

# Nebius publishes NVIDIA's operators as applications of a cluster. The GPU operator installs the driver, so the nodes' images
# have none.
resource "nebius_applications_v1alpha1_k8s_release" "network_operator" {
  parent_id        = var.iam_project_id
  cluster_id       = nebius_mk8s_v1_cluster.this.id
  application_name = "network-operator"
  namespace        = "network-operator"
  product_slug     = "nebius/nvidia-network-operator"
  set = {
    "operator.resources.limits.cpu"    = "500m"
    "operator.resources.limits.memory" = "1280Mi"
  }

  depends_on = [nebius_mk8s_v1_node_group.system, nebius_mk8s_v1_node_group.workers]
}

resource "nebius_applications_v1alpha1_k8s_release" "gpu_operator" {
  parent_id        = var.iam_project_id
  cluster_id       = nebius_mk8s_v1_cluster.this.id
  application_name = "gpu-operator"
  namespace        = "gpu-operator"
  product_slug     = "nebius/nvidia-gpu-operator"
  set              = { "dcgmExporter.enabled" = "false" }

  depends_on = [nebius_applications_v1alpha1_k8s_release.network_operator]
}

# Makes a disk for each worker when its pod starts.
resource "kubernetes_storage_class" "local_disk" {
  for_each = {
    for mount in var.node_local_jail_submounts : local.local_disk_classes[mount.name] => mount...
  }

  metadata {
    name = each.key
  }
  storage_provisioner = "compute.csi.nebius.com"
  volume_binding_mode = "WaitForFirstConsumer"
  parameters = {
    "type"                      = each.value[0].disk_type
    "csi.storage.k8s.io/fstype" = each.value[0].filesystem_type
  }

  depends_on = [nebius_mk8s_v1_node_group.system]
}

# With OpenKruise, whose StatefulSets the operator makes.
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

# Mounts the filestores on every node and makes a volume and a claim of each. The claims are in the cluster's namespace.
resource "helm_release" "slurm_cluster_storage" {
  name             = "slurm-cluster-storage"
  namespace        = "soperator"
  create_namespace = true
  repository       = var.soperator_charts.repository
  chart            = "helm-slurm-cluster-storage"
  version          = var.soperator_charts.version
  values           = [yamlencode(local.storage_values)]
  # A claim is bound only when a pod uses it, so waiting for the claims would wait for the next release.
  wait = false

  depends_on = [nebius_mk8s_v1_node_group.system, nebius_mk8s_v1_node_group.workers]
}

resource "helm_release" "slurm_cluster" {
  name       = "slurm-cluster"
  namespace  = helm_release.slurm_cluster_storage.namespace
  repository = var.soperator_charts.repository
  chart      = "helm-slurm-cluster"
  version    = var.soperator_charts.version
  values     = [yamlencode(local.cluster_values)]
  timeout    = 1800

  depends_on = [
    helm_release.soperator,
    helm_release.slurm_cluster_storage,
    kubernetes_storage_class.local_disk,
    nebius_applications_v1alpha1_k8s_release.gpu_operator,
  ]
}

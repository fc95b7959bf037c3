variable "company_name" {
  description = "Name of the cluster and of everything in it: at most 32 lower-case letters, digits and dashes."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{0,30}[a-z0-9]$", var.company_name))
    error_message = "company_name must have 2 to 32 lower-case letters, digits and dashes and start with a letter."
  }
}

variable "region" {
  description = "Nebius region, for example eu-north1."
  type        = string

  validation {
    condition     = can(regex("^[a-z]{2}-[a-z]+[0-9]$", var.region))
    error_message = "region must look like eu-north1."
  }
}

variable "iam_project_id" {
  description = "Project that owns the resources (project-...)."
  type        = string

  validation {
    condition     = startswith(var.iam_project_id, "project-")
    error_message = "iam_project_id must start with project-."
  }
}

variable "iam_tenant_id" {
  description = "Tenant of the project (tenant-...)."
  type        = string

  validation {
    condition     = startswith(var.iam_tenant_id, "tenant-")
    error_message = "iam_tenant_id must start with tenant-."
  }
}

variable "iam_token" {
  description = "Short-lived IAM token; .envrc sets it. Do not store it in a file."
  type        = string
  sensitive   = true

  validation {
    condition     = length(var.iam_token) > 0
    error_message = "iam_token is empty: source .envrc first."
  }
}

variable "vpc_subnet_id" {
  description = "Subnet of the nodes (vpcsubnet-...)."
  type        = string

  validation {
    condition     = startswith(var.vpc_subnet_id, "vpcsubnet-")
    error_message = "vpc_subnet_id must start with vpcsubnet-."
  }
}

variable "k8s_version" {
  description = "Kubernetes version, major.minor."
  type        = string
  default     = "1.32"

  validation {
    condition     = can(regex("^1\\.[0-9]+$", var.k8s_version))
    error_message = "k8s_version must look like 1.32."
  }
}

variable "slurm_nodeset_workers" {
  description = "GPU nodes: number, machine type and boot disk."
  type = list(object({
    size = number
    resource = object({
      platform = string
      preset   = string
    })
    boot_disk = object({
      type                 = string
      size_gibibytes       = number
      block_size_kibibytes = number
    })
  }))

  validation {
    condition     = length(var.slurm_nodeset_workers) > 0
    error_message = "slurm_nodeset_workers needs at least one node set."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : set.size >= 1 && floor(set.size) == set.size])
    error_message = "slurm_nodeset_workers: size must be a whole number from 1."
  }

  validation {
    condition = alltrue([
      for set in var.slurm_nodeset_workers : contains(["gpu-h100-sxm", "gpu-h200-sxm", "gpu-b200-sxm"], set.resource.platform)
    ])
    error_message = "slurm_nodeset_workers: platform must be gpu-h100-sxm, gpu-h200-sxm or gpu-b200-sxm."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : can(regex("^[18]gpu-[0-9]+vcpu-[0-9]+gb$", set.resource.preset))])
    error_message = "slurm_nodeset_workers: preset must look like 1gpu-16vcpu-200gb or 8gpu-128vcpu-1600gb."
  }

  validation {
    condition     = length(distinct([for set in var.slurm_nodeset_workers : set.resource])) == 1
    error_message = "slurm_nodeset_workers: all sets must have the same platform and preset, because SOperator's workers are equal pods."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : set.boot_disk.size_gibibytes >= 512])
    error_message = "slurm_nodeset_workers: boot_disk.size_gibibytes must be at least 512, because images and logs fill a smaller disk within days."
  }

  validation {
    condition = alltrue([
      for set in var.slurm_nodeset_workers : contains(["NETWORK_SSD", "NETWORK_SSD_NON_REPLICATED", "NETWORK_SSD_IO_M3"], set.boot_disk.type)
    ])
    error_message = "slurm_nodeset_workers: boot_disk.type must be NETWORK_SSD, NETWORK_SSD_NON_REPLICATED or NETWORK_SSD_IO_M3."
  }

  validation {
    condition     = alltrue([for set in var.slurm_nodeset_workers : contains([4, 8, 16, 32, 64, 128], set.boot_disk.block_size_kibibytes)])
    error_message = "slurm_nodeset_workers: boot_disk.block_size_kibibytes must be a power of two from 4 to 128."
  }
}

variable "infiniband_fabric" {
  description = "InfiniBand fabric of the region for nodes with 8 GPUs; empty for nodes with one."
  type        = string
  default     = ""
}

variable "filestore_jail" {
  description = "The shared root file system of all Slurm nodes."
  type = object({
    size_gibibytes       = number
    block_size_kibibytes = number
  })
  default = {
    size_gibibytes       = 2048
    block_size_kibibytes = 4
  }

  validation {
    condition     = var.filestore_jail.size_gibibytes >= 64
    error_message = "filestore_jail.size_gibibytes must be at least 64."
  }
}

variable "filestore_jail_submounts" {
  description = "More shared file systems and their mount paths."
  type = list(object({
    name       = string
    mount_path = string
    spec = object({
      size_gibibytes       = number
      block_size_kibibytes = number
    })
  }))
  default = []

  validation {
    condition     = alltrue([for mount in var.filestore_jail_submounts : can(regex("^/[a-z]", mount.mount_path))])
    error_message = "filestore_jail_submounts: mount_path must be an absolute path."
  }

  validation {
    condition     = length(distinct([for mount in var.filestore_jail_submounts : mount.name])) == length(var.filestore_jail_submounts)
    error_message = "filestore_jail_submounts: each name must be unique."
  }

  validation {
    condition     = alltrue([for mount in var.filestore_jail_submounts : can(regex("^[a-z][a-z0-9-]*$", mount.name))])
    error_message = "filestore_jail_submounts: a name must consist of lower-case letters, digits and dashes."
  }

  validation {
    condition     = alltrue([for mount in var.filestore_jail_submounts : mount.spec.size_gibibytes >= 1])
    error_message = "filestore_jail_submounts: spec.size_gibibytes must be at least 1."
  }
}

variable "node_local_jail_submounts" {
  description = "Disks that each GPU node has for itself, and their mount paths: scratch that no other node sees."
  type = list(object({
    name            = string
    mount_path      = string
    size_gibibytes  = number
    disk_type       = string
    filesystem_type = string
  }))
  default = []

  validation {
    condition     = alltrue([for mount in var.node_local_jail_submounts : can(regex("^/[a-z]", mount.mount_path))])
    error_message = "node_local_jail_submounts: mount_path must be an absolute path."
  }

  validation {
    condition     = alltrue([for mount in var.node_local_jail_submounts : can(regex("^[a-z][a-z0-9-]*$", mount.name))])
    error_message = "node_local_jail_submounts: a name must consist of lower-case letters, digits and dashes."
  }

  validation {
    condition = alltrue([
      for mount in var.node_local_jail_submounts : contains(["NETWORK_SSD", "NETWORK_SSD_NON_REPLICATED", "NETWORK_SSD_IO_M3"], mount.disk_type)
    ])
    error_message = "node_local_jail_submounts: disk_type must be NETWORK_SSD, NETWORK_SSD_NON_REPLICATED or NETWORK_SSD_IO_M3."
  }

  validation {
    condition = alltrue([
      for mount in var.node_local_jail_submounts : mount.size_gibibytes >= 1 && (mount.disk_type == "NETWORK_SSD" || mount.size_gibibytes % 93 == 0)
    ])
    error_message = "node_local_jail_submounts: size_gibibytes must be a multiple of 93 for disk types other than NETWORK_SSD."
  }

  validation {
    condition     = alltrue([for mount in var.node_local_jail_submounts : contains(["ext4", "xfs"], mount.filesystem_type)])
    error_message = "node_local_jail_submounts: filesystem_type must be ext4 or xfs."
  }
}

variable "slurm_login_ssh_root_public_keys" {
  description = "Public keys with root login."
  type        = list(string)

  validation {
    condition = length(var.slurm_login_ssh_root_public_keys) > 0 && alltrue([
      for key in var.slurm_login_ssh_root_public_keys : can(regex("^(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp[0-9]+) [A-Za-z0-9+/=.]+", key))
    ])
    error_message = "slurm_login_ssh_root_public_keys needs at least one public key (ssh-ed25519 AAAA... you@example.com)."
  }
}

variable "soperator_charts" {
  description = "OCI folder and version of the SOperator charts, as Nebius publishes them."
  type = object({
    repository = string
    version    = string
  })

  validation {
    condition     = startswith(var.soperator_charts.repository, "oci://") && can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+", var.soperator_charts.version))
    error_message = "soperator_charts must be an oci:// repository and a version such as 1.22.1."
  }
}

# AKS with an InfiniBand GPU pool, the Blob CSI driver and optionally Managed Lustre with its CSI driver.

resource "azurerm_resource_group" "this" {
  name     = var.name
  location = var.location
}

resource "azurerm_virtual_network" "this" {
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  address_space       = ["10.0.0.0/8"]
}

resource "azurerm_subnet" "nodes" {
  name                 = "nodes"
  resource_group_name  = azurerm_resource_group.this.name
  virtual_network_name = azurerm_virtual_network.this.name
  address_prefixes     = ["10.240.0.0/16"]
}

resource "azurerm_subnet" "lustre" {
  name                 = "lustre"
  resource_group_name  = azurerm_resource_group.this.name
  virtual_network_name = azurerm_virtual_network.this.name
  address_prefixes     = ["10.241.0.0/24"]
}

resource "azurerm_kubernetes_cluster" "this" {
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  dns_prefix          = var.name
  kubernetes_version  = var.kubernetes_version
  # Pods use an Azure identity for storage, so no keys are stored.
  oidc_issuer_enabled       = true
  workload_identity_enabled = true

  default_node_pool {
    name           = "system"
    vm_size        = "Standard_D16ds_v5"
    node_count     = 2
    vnet_subnet_id = azurerm_subnet.nodes.id
  }

  identity {
    type = "SystemAssigned"
  }

  storage_profile {
    blob_driver_enabled = true
  }

  network_profile {
    network_plugin      = "azure"
    network_plugin_mode = "overlay"
    pod_cidr            = "192.168.0.0/16"
    service_cidr        = "172.16.0.0/16"
    dns_service_ip      = "172.16.0.10"
  }

  lifecycle {
    precondition {
      condition     = var.lustre == null || !var.lustre_from_claims
      error_message = "Set either lustre or lustre_from_claims: with both, the cluster would pay for two file systems."
    }
  }
}

resource "azurerm_kubernetes_cluster_node_pool" "gpu" {
  name                  = "gpu"
  kubernetes_cluster_id = azurerm_kubernetes_cluster.this.id
  vm_size               = var.gpu_vm_size
  node_count            = var.gpu_nodes
  vnet_subnet_id        = azurerm_subnet.nodes.id
  # The GPU operator installs one version of driver and device plugin on all nodes.
  gpu_driver  = "None"
  node_taints = ["sku=gpu:NoSchedule"]
  node_labels = { "keepstep/pool" = "gpu" }
}

resource "azurerm_managed_lustre_file_system" "this" {
  count = var.lustre == null ? 0 : 1

  name                   = "${var.name}-lustre"
  resource_group_name    = azurerm_resource_group.this.name
  location               = azurerm_resource_group.this.location
  sku_name               = var.lustre.sku_name
  subnet_id              = azurerm_subnet.lustre.id
  storage_capacity_in_tb = var.lustre.size_tib
  zones                  = [var.lustre.zone]

  maintenance_window {
    day_of_week        = var.lustre.day_of_week
    time_of_day_in_utc = var.lustre.time_utc
  }
}

# The driver is published as manifests and not as a chart, so its release is applied with kubectl.
resource "terraform_data" "lustre_driver" {
  count = var.lustre != null || var.lustre_from_claims ? 1 : 0

  triggers_replace = [azurerm_kubernetes_cluster.this.id, var.lustre_driver_version]

  provisioner "local-exec" {
    command     = "${path.module}/install-lustre-driver ${var.lustre_driver_version}"
    environment = { KUBECONFIG_TEXT = azurerm_kubernetes_cluster.this.kube_config_raw }
  }

  depends_on = [azurerm_kubernetes_cluster_node_pool.gpu]
}

# The driver creates a file system for a claim with the identity of the kubelets, in the node resource group.
resource "azurerm_role_assignment" "lustre" {
  for_each = var.lustre_from_claims ? {
    Reader                = "/subscriptions/${var.subscription_id}"
    Contributor           = azurerm_kubernetes_cluster.this.node_resource_group_id
    "Network Contributor" = azurerm_virtual_network.this.id
  } : {}

  scope                = each.value
  role_definition_name = each.key
  principal_id         = azurerm_kubernetes_cluster.this.kubelet_identity[0].object_id
}

# The Blob driver creates a storage account for each claim and needs the permission for it.
resource "azurerm_role_assignment" "storage" {
  scope                = azurerm_resource_group.this.id
  role_definition_name = "Contributor"
  principal_id         = azurerm_kubernetes_cluster.this.identity[0].principal_id
}
